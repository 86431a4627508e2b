"""Run and compare from Python, with names, files, or objects of a notebook.

result = fedloom.run("fedal", rounds=20, seed=1)
result.accuracy, result.summary["bytes"]["up"]

result = fedloom.run("fedavg", data=(X, y), models=net, clients=5, rounds=20)
result.models[0](torch.from_numpy(X))

comparison = fedloom.compare(["fedal", "fedmd", "local"], seeds=[0, 1, 2], iterations=200)
comparison["differences"]
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack, cast

import numpy as np
from torch import nn

from fedloom.core.errors import ConfigError, DataError, FedloomError, did_you_mean
from fedloom.core.method import Method
from fedloom.experiment.cards import FIT, html_card, latex_table
from fedloom.experiment.config import objects
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.run import Experiment, RunConfig
from fedloom.experiment.config.spoken import in_python
from fedloom.experiment.plan.reading import check, read, seeds_from, seeds_of
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.compare import execute_all
from fedloom.experiment.run.engine import Backend, local_backend
from fedloom.experiment.run.execute import RunResult, Status, Stopped, settle
from fedloom.experiment.run.metrics import GLOBAL, SCORES, four_digits, in_words
from fedloom.experiment.run.result import Comparison, RunSummary
from fedloom.experiment.run.trained import TrainedModels
from fedloom.experiment.run.tuning import trials

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch.utils.data import Dataset as TorchDataset

__all__ = [
    "Experiment",
    "Result",
    "RunConfig",
    "Status",
    "Stopped",
    "compare",
    "execute",
    "read",
    "run",
]

MOST_SHOWN = 20
"""Rows of a table in the card of a result."""
OF_FRAMES = (
    "id",
    "drop",
    "keep",
    "missing",
    "task",
    "missing_words",
    "decimal",
    "encode",
    "missing_columns",
)
"""Keywords that describe a frame's columns."""
OF_DATA = frozenset(DataConfig.model_fields) - frozenset(RunConfig.model_fields)
"""Settings of `[data]` that `run` and `compare` take as keywords, too."""


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """A finished run. It prints in five lines, and is a card in a notebook.

    Example:
        >>> result = run("fedmd", iterations=5, clients=3, models="mlp", seed=1)
        >>> result.summary["rounds"], len(result.models), len(result.clients)
        (5, 3, 3)

    Attributes:
        summary: the content of `result.json`.
        rows: (round, iteration, stage, party, metric, value) of every measurement; `metrics` is the
            same as a frame.
        folder: the run folder; None if nothing was written.
    """

    summary: dict[str, Any]
    rows: list[list[Any]]
    folder: Path | None
    _trained: TrainedModels

    @property
    def accuracy(self) -> float:
        """Mean over clients of the final accuracy on the global test set.

        Example:
            >>> 0 < result.accuracy < 1
            True

        Raises:
            ConfigError: the label is a number, see `rmse`.
        """
        if "accuracy" not in self.summary:
            raise ConfigError(
                "the label of this run is a number, which has no accuracy: see result.rmse"
            )
        return float(self.summary["accuracy"]["mean"])

    @property
    def rmse(self) -> float:
        """Mean over clients of the final root mean squared error on the global test set, in the
        unit of the label.

        Example:
            >>> X, y = np.random.default_rng(0).normal(size=(90, 3)), np.linspace(0, 9, 90)
            >>> settings = {"task": "number", "models": "linear", "rounds": 1, "clients": 2, "partition": "iid"}
            >>> number = run("fedavg", data=(X, y), **settings)
            >>> number.rmse > 0
            True

        Raises:
            ConfigError: the label has classes, see `accuracy`.
        """  # noqa: E501
        if "rmse" not in self.summary:
            raise ConfigError(
                "the label of this run has classes and no error in a unit: see result.accuracy"
            )
        return float(self.summary["rmse"]["mean"])

    @cached_property
    def models(self) -> list[nn.Module]:
        """The trained network of each client, in evaluation mode on the CPU, as the run's main
        metric evaluates it, so after fine-tuning if the method fine-tunes.

        Example:
            >>> [type(model).__name__ for model in result.models]
            ['MLP', 'MLP', 'MLP']

        Raises:
            DataError: the models are at nodes.
        """
        return [self._trained.client(i) for i in range(self.summary["clients"])]

    @cached_property
    def model(self) -> nn.Module | None:
        """The model that all clients share, such as the server's average; None if each client has
        its own.

        Example:
            >>> result.model is None  # FedMD: each client has its own
            True
        """
        return self._trained.common()

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """Every measurement: round, iteration, stage, party ("" for all), metric and value. A
        client has the name of the owner of its rows, if it is known.

        Example:
            >>> result.metrics.columns.tolist()
            ['round', 'iteration', 'stage', 'party', 'metric', 'value']
        """
        columns = ["round", "iteration", "stage", "party", "metric", "value"]
        names = self._trained.names
        rows = [[*row[:3], names.get(row[3], row[3]), *row[4:]] for row in self.rows]
        return _pandas().DataFrame(rows, columns=columns)

    @cached_property
    def clients(self) -> pandas.DataFrame:
        """One row for each client: its network, number of training rows, whether it is unseen, and
        its final measurements.

        Example:
            >>> result.clients["client"].tolist()
            ['client-0', 'client-1', 'client-2']
        """
        return _pandas().DataFrame(self._client_rows())

    def _client_rows(self) -> list[dict[str, Any]]:
        """See `clients`."""
        last = max((row[0] for row in self.rows), default=0)
        stage = self.rows[-1][2] if self.rows else ""
        found = [
            {
                "client": name,
                "network": network,
                "rows": rows,
                "unseen": i in self.summary.get("unseen", []),
            }
            for i, (name, network, rows) in enumerate(self._trained.parties())
        ]
        places = {entry["client"]: entry for entry in found}
        for round, _, at, party, metric, value in self.rows:
            if (round, at) == (last, stage) and party in places:
                places[party][metric] = value
        for entry in found:
            entry["client"] = self._trained.names[str(entry["client"])]
        return found

    def to_frame(self) -> pandas.DataFrame:
        """What the server has learned: the coefficients of a linear model with standard errors,
        p-values and intervals, or the importance of each column of trees. Tables with other columns
        than the first, such as that of the fit, are in `summary["learned"]`.

        Example:
            >>> trees = run("fedboost", data="breast_cancer", rounds=1, clients=2, partition="iid")
            >>> trees.to_frame().columns.tolist()[0]
            'Column'

        Raises:
            ConfigError: the method reports no table.
        """
        columns, rows = self._learned()
        return _pandas().DataFrame(rows, columns=columns)

    def _learned(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of `to_frame`."""
        tables = self.summary.get("learned", [])
        if not tables:
            raise ConfigError(
                f"{self.summary['method']} reports no table of what it has learned: see "
                "result.clients"
            )
        columns = tables[0]["columns"]
        alike = [table for table in tables if table["columns"] == columns]
        rows = [
            [*([table["title"]] if len(alike) > 1 else []), *row]
            for table in alike
            for row in table["rows"]
        ]
        return [*(["Table"] if len(alike) > 1 else []), *columns], rows

    def to_latex(self) -> str:
        """What the server has learned, or else the clients with their first measurements, as a
        LaTeX table (package booktabs). `clients` has all measurements.

        Example:
            >>> result.to_latex().splitlines()[0]
            '% needs \\\\usepackage{booktabs}'
        """
        if self.summary.get("learned"):
            return latex_table(*self._learned())
        clients = self._client_rows()
        left_out = () if any(client["unseen"] for client in clients) else ("unseen",)
        columns = [
            name
            for name in dict.fromkeys(name for client in clients for name in client)
            if name not in left_out
        ]
        heads = [name[0].upper() + name[1:].replace("auc", "AUC") for name in columns[:FIT]]
        return latex_table(
            heads, [[client.get(name) for name in columns[:FIT]] for client in clients]
        )

    def plot(self) -> Figure:
        """The accuracy by iteration, as a matplotlib Figure.

        Example:
            >>> result.plot().get_axes()[0].get_xlabel()
            'iteration'
        """
        from fedloom.report import quick

        return quick.learning(self.rows, RunSummary.model_validate(self.summary))

    def _repr_html_(self) -> str:
        head, *lines = repr(self).splitlines()
        columns, rows = self._learned() if self.summary.get("learned") else ([], [])
        shown = [
            [four_digits(c) if isinstance(c, float) else "" if c is None else str(c) for c in row]
            for row in rows
        ]
        more = [f"the first {MOST_SHOWN} of {len(rows)} rows:"] if len(rows) > MOST_SHOWN else []
        return html_card(
            head, [*(line.strip() for line in lines), *more], columns, shown[:MOST_SHOWN]
        )

    def report(self) -> Path:
        """Write the HTML page of the run into its folder; returns its path.

        Example:
            >>> result.report().name
            'report.html'

        Raises:
            ConfigError: the run has no folder.
        """
        from fedloom import report

        return report.write(self._written)

    def export(self, out: str | Path, *, force: bool = False) -> Path:
        """Write a folder for each trained model, which plain PyTorch opens, as `fedloom export`
        does; returns `out`.

        Example:
            >>> sorted(folder.name for folder in result.export(result.folder / "models").iterdir())
            ['client-0', 'client-1', 'client-2']

        Args:
            out: the folder to write to.
            force: whether to replace the models in it.

        Raises:
            ConfigError: the run has no folder, or `out` has models.
            CheckpointError: a model cannot be written.
        """
        from fedloom.deploy.export import export

        return export(self._written, Path(out), force=force).folder

    @property
    def _written(self) -> Path:
        if self.folder is None:
            raise ConfigError("this run wrote no folder: repeat it with out=FOLDER")
        return self.folder

    def __repr__(self) -> str:
        s = RunSummary.model_validate(self.summary)
        per_round = f"{s.rounds} rounds, {s.iterations:,} iterations, seed {s.seed}"
        lines = [f"{s.method} on {s.dataset}: {s.clients} clients, {per_round}"]
        for metric, found in list(s.accuracies.items())[:2]:
            chance = s.chance_of(metric)
            beside = (
                "" if chance is None else f", {s.most_frequent(metric)} {in_words(metric, chance)}"
            )
            shown = in_words(metric, found.mean)
            shown += (
                f" ± {in_words(metric, found.std)} over clients"
                if len(found.per_client) > 1
                else ""
            )
            name = SCORES[s.on_test].title if s.task == "number" else "accuracy"
            lines.append(f"  {name} {s.describe(metric)}: {shown}{beside}")
        if s.scores:
            lines.append(
                "  "
                + ", ".join(
                    f"{name} {value:.3f}" for name, value in s.scores.items() if name != GLOBAL
                )
            )
        lines.append(
            f"  sent {s.bytes.up / 1e6:,.2f} MB to the server, {s.bytes.down / 1e6:,.2f} MB back, "
            f"{s.bytes.across / 1e6:,.2f} MB between clients; {s.failures} failed calls"
        )
        lines.append(f"  {s.seconds['total']:,.1f} s; {self.folder or 'no folder'}")
        return "\n".join(lines)


class CompareResult(dict[str, Any]):
    """The content of `comparison.json`. It prints the verdict and the differences with their 95 %
    intervals.

    Example:
        >>> found = compare(["fedmd", "local"], seeds=2, iterations=5, clients=3, models="mlp")
        >>> found.to_frame()["method"].tolist()
        ['fedmd', 'local']
    """

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"a comparison has no {key!r}.{did_you_mean(str(key), self)}")

    def __repr__(self) -> str:
        from fedloom.report.results import conclusions
        from fedloom.report.terminal import line

        return "\n  ".join([line(self), *conclusions(self._checked)])

    @property
    def _checked(self) -> Comparison:
        return Comparison.model_validate(self)

    @property
    def verdict(self) -> str:
        """The lead of the best method over the second best, with its interval; and what was not
        equal.

        Example:
            >>> "fedmd" in found.verdict
            True
        """
        from fedloom.report.terminal import line

        return line(self)

    def to_frame(self) -> pandas.DataFrame:
        """A row for each method: mean and standard deviation over seeds of the main metric; the
        reference minus the method, with the ends of its 95 % interval; bytes and seconds of a run.
        A method that diverged has no seeds.

        Example:
            >>> found.to_frame()["seeds"].tolist()
            [2, 2]
        """
        found = self._checked
        differences = {d.other: d for d in found.differences}
        rows = []
        for m in found.methods:
            one = found.values(found.metric)[m.name]
            d = differences.get(m.name)
            low, high = (None, None) if d is None or d.interval is None else d.interval
            lead = {"difference": None if d is None else d.mean, "low": low, "high": high}
            costs = {"sent": m.bytes.sent, "received": m.bytes.down, "seconds": m.seconds}
            row = {
                "method": m.name,
                **({"mode": m.mode} if found.by_mode else {}),
                str(found.metric): one.mean,
                "s.d.": one.std_over_seeds,
                "seeds": len(m.seeds),
            }
            rows.append({**row, **lead, **costs})
        rows += [{"method": name, "seeds": 0} for name in found.without_result]
        return _pandas().DataFrame(rows)

    def to_latex(self) -> str:
        """The table of a paper, for the package booktabs: see `fedloom compare --latex`.

        Example:
            >>> r"\\begin{tabular}" in found.to_latex()
            True
        """
        from fedloom.report import paper

        return paper.latex(self._checked)

    def to_bibtex(self) -> str:
        """The BibTeX entries that `to_latex` cites.

        Example:
            >>> found.to_bibtex().count("@") > 1
            True
        """
        from fedloom.report import paper

        return paper.bibtex(self._checked)

    def plot(self) -> Figure:
        """The main metric of each method, its mean and each seed's value, as a matplotlib Figure.

        Example:
            >>> len(found.plot().get_axes())
            1
        """
        from fedloom.report import quick

        return quick.methods(self._checked)

    def _repr_html_(self) -> str:
        from fedloom.report import quick

        return quick.comparison_card(self._checked, self.verdict)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            "metrics and clients are data frames: pip install pandas, or use result.rows"
        ) from None
    return pandas


class RunSettings(TypedDict, total=False):
    """The settings that `run` and `compare` take as keywords, beside their own arguments: those of
    a run, and those of its data. `fedloom list settings` and the settings page describe each.

    Example:
        >>> small: RunSettings = {"iterations": 5, "clients": 3, "models": "mlp"}
        >>> run("fedmd", **small).summary["clients"]
        3
    """

    name: str
    preset: str
    params: Mapping[str, Any]
    seed: int
    rounds: int | None
    iterations: int | None
    columns: Mapping[str, Any]
    topology: Mapping[str, Any]
    churn: Mapping[str, Any]
    local: Mapping[str, Any]
    aggregate: Mapping[str, Any]
    engine: str | Mapping[str, Any]
    evaluate: Mapping[str, Any]
    faults: Mapping[str, Any]
    method: str
    root: str | None
    clients: int
    partition: str
    options: Mapping[str, Any]
    unseen: float | str | Sequence[str]
    server_rows: int | str | None
    public_rows: int | None
    test_fraction: float
    test_rows: int | None
    validation: float
    own_test_rows: int | None
    id: str | None
    drop: Sequence[str]
    keep: Sequence[str]
    missing: str
    task: str | None
    missing_words: Sequence[str]
    decimal: str
    encode: Mapping[str, str]
    missing_columns: str
    label_scale: tuple[float, float] | None
    row_schema: Mapping[str, Any] | None


Data: TypeAlias = (
    "tuple[Any, Any] | pandas.DataFrame | TorchDataset[Any] | list[Any] | Mapping[str, Any] | "
    "str | Path"
)
"""Arrays (X, y), a data frame, a torch Dataset, a list with one of these for each client; or a name
or settings.
"""
Model: TypeAlias = nn.Module | Callable[..., Any] | str
"""A module, a factory or a name."""
Progress: TypeAlias = Callable[["Status"], None] | bool | None
"""A function that is called after each round, or True for a progress bar."""
F = TypeVar("F", bound=Callable[..., Any])


def _in_python(function: F) -> F:
    """The function, whose errors name arguments of Python in place of options of the
    command line.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FedloomError as error:
            error.args = (in_python(str(error)),)
            raise

    return cast(F, wrapped)


@_in_python
def run(
    config: RunConfig | Method | str | Path,
    *,
    data: Data | None = None,
    test: Data | float | None = None,
    label: str | None = None,
    group: str | Sequence[Any] | np.ndarray | None = None,
    models: Model | Sequence[Model] | Mapping[str, Any] | None = None,
    pretrained: nn.Module | str | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = None,
    trust: Sequence[str] = (),
    **settings: Unpack[RunSettings],
) -> Result:
    """Execute one run.

    Objects are copied and recorded: the run folder has their fingerprints, shapes and classes in
    `objects.json`, and the same script can resume the run.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X, y = rng.normal(size=(120, 4)), rng.integers(0, 2, 120)
        >>> one = run("fedavg", data=(X, y), group=np.arange(120) % 3, models="linear", rounds=2)
        >>> one.summary["clients"]
        3

    Args:
        config: a method (its name, page or `Method`), a `RunConfig`, the path of a TOML file, or
            the name of an experiment.
        data: the rows: arrays (X, y), a data frame, a torch Dataset, or a list with one of these
            for each client; the name or path of a data set; or a table of settings. Arrays and
            Datasets reach the networks as they are (bytes of images as 0 to 1), and columns of
            frames are encoded and standardized.
        test: the test rows in the same form as one client's, or the share of rows to hold out
            (default 0.25); of a frame also the column that says train or test, or names of owners.
        label: the column of a frame or file that is predicted.
        group: the owner of each row, each of whom is a client: a column of a frame or file, or an
            array (n,).
        models: a module, a factory (called with input shape and number of classes, or without
            arguments) or a name for all clients, or a list with one for each; or a table of
            settings. Clients start with a module's weights.
        pretrained: the server's pretrained model: a module, a name, or a table of settings.
        out: the run folder; None writes nothing.
        resume: continue the run in `out`.
        progress: called after each round; True shows a progress bar.
        trust: code that a TOML file outside the working folder may name, such as "mine.py" or
            "package.module:name".
        **settings: further settings, such as `seed=1`, `params={"tau": 5}`, and those of `[data]`,
            such as `clients=5`, or for a frame `missing="median"`, `drop=["after_*"]`, `keep`, `id`
            and `unseen=["va"]`. With a `RunConfig`, a table replaces the whole table.

    Raises:
        FedloomError: the config, an object or a checkpoint is invalid.
    """
    if isinstance(config, list | tuple):
        raise ConfigError(
            f"run takes one method: to compare {len(config)}, use fedloom.compare({list(config)!r})"
        )
    if not isinstance(config, str | Path | RunConfig | Method):
        raise ConfigError(
            f"run takes the name or file of a method, a Method or a RunConfig, not {_kind(config)}"
        )
    given = _named({**settings}, data, test, label, group, models, pretrained)
    if isinstance(config, Method):
        config = check(
            {"run": {"method": objects.method_name(config), "name": config.name, **given}}
        ).run
    elif isinstance(config, RunConfig):
        config = check({"run": {**config.model_dump(), **given}}).run
    else:
        experiment = read(str(config), flags=given, trust=trust)
        if experiment.compare is not None:
            raise ConfigError(f"{config} is a comparison: use fedloom.compare({str(config)!r})")
        config = experiment.run
    folder = _settled(out, resume)
    with _shown(progress, [config]) as shown:
        found = execute(config, folder, resume=resume, progress=shown, keep_models=True)
    assert found.trained is not None
    return Result(found.summary, found.metrics, found.folder, found.trained)


@_in_python
def compare(
    methods: str | Path | Sequence[str | Method | dict[str, Any]],
    *,
    seeds: int | Sequence[int] | None = None,
    data: Data | None = None,
    test: Data | float | None = None,
    label: str | None = None,
    group: str | Sequence[Any] | np.ndarray | None = None,
    models: Model | Sequence[Model] | Mapping[str, Any] | None = None,
    pretrained: nn.Module | str | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = None,
    trust: Sequence[str] = (),
    tune: bool = False,
    **settings: Unpack[RunSettings],
) -> CompareResult:
    """Execute several methods and seeds on identical splits; returns the content of
    `comparison.json`.

    Each of its `differences` has the 95 % `interval` of the mean over seeds, if there are several.
    A method that diverges is `left_out` with its reason; the others finish.

    Example:
        >>> both = compare(["fedavg", "local"], clients=2, models="linear", iterations=2, data={"test_rows": 50})
        >>> [method["name"] for method in both["methods"]]
        ['fedavg', 'local']

    Args:
        methods: names, `Method` objects, or tables of `method`, `preset`, `params`, `name`; the
            first is the reference. Or the name or TOML file of a comparison.
        seeds: a number of seeds, such as 5 for 0 to 4, or a list of them: one run for each method
            and seed. None for those of the comparison, or 0.
        tune: first choose the learning rate of each method on validation rows, with equal effort
            for all.

    All further arguments are those of `run`.

    Raises:
        FedloomError: the config, an object or a checkpoint is invalid.
    """  # noqa: E501
    given = _named({**settings}, data, test, label, group, models, pretrained)
    if isinstance(methods, str | Path):
        config = read(str(methods), flags=given, trust=trust)
        if config.compare is None:
            raise ConfigError(
                f"{methods} is a single run: use fedloom.run({str(methods)!r}), or list several "
                f"methods, such as [{str(methods)!r}, 'local']"
            )
        run_values, compared = config.run.model_dump(), config.compare.model_dump()
    elif not isinstance(methods, list | tuple):
        raise ConfigError(
            f"methods must be a list, such as ['fedal', 'local'], or a name, not {_kind(methods)}"
        )
    else:
        run_values, compared = given, {"methods": [_entry(method) for method in methods]}
    experiment = check(
        {
            "run": run_values,
            "compare": {
                **compared,
                **(
                    {}
                    if seeds is None
                    else {"seeds": seeds_of(seeds) if isinstance(seeds, str) else seeds_from(seeds)}
                ),
            },
        }
    )
    folder = _settled(out, resume, several=True)
    every = [
        *experiment.runs(),
        *(run for tried in (trials(experiment) if tune else ()) for run in tried.values()),
    ]
    with _shown(progress, every) as shown:
        found = execute_all(
            experiment, folder, resume=resume, progress=shown, execute=execute, tune=tune
        )
    return CompareResult(found)


@contextlib.contextmanager
def _shown(
    progress: Progress, runs: Sequence[RunConfig]
) -> Iterator[Callable[[Status], None] | None]:
    """What is called after each round: for True, a bar over the rounds of all runs, in a terminal
    or a notebook.
    """
    if progress is not None and not callable(progress) and not isinstance(progress, bool):
        raise ConfigError(
            f"progress must be True, or a function of the state after a round, not {progress!r}"
        )
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(transient=True) as bar:
        task = bar.add_task("rounds", total=sum(run.resolve()[2] for run in runs))

        def show(status: Status) -> None:
            text = (
                f"{status.run.label} seed {status.run.seed}: {status.metric} {status.accuracy:.1%}"
            )
            bar.update(task, advance=1, description=text)

        yield show


def _settled(out: str | Path | None, resume: bool, several: bool = False) -> Path | None:
    """The output folder, if any; see `settle`."""
    if out is not None:
        settle(Path(out), resume=resume, several=several)
    return None if out is None else Path(out)


def _entry(method: str | Method | Mapping[str, Any]) -> str | dict[str, Any]:
    """An entry of `compare.methods`, with the name of a method object."""
    if isinstance(method, Method):
        return {"method": objects.method_name(method), "name": method.name}
    if isinstance(method, Mapping) and isinstance(held := method.get("method"), Method):
        return {"name": held.name, **method, "method": objects.method_name(held)}
    if not isinstance(method, str | Path | Mapping):
        raise ConfigError(
            f"an entry of methods is a name, a file, a Method or a mapping, not {_kind(method)}"
        )
    return dict(method) if isinstance(method, Mapping) else str(method)


def _kind(value: object) -> str:
    """A value in an error: a class by its name, others by their kind."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _named(
    settings: Mapping[str, Any],
    data: Any,
    test: Any,
    label: str | None,
    group: Any,
    models: Any,
    pretrained: Any,
) -> dict[str, Any]:
    """The settings with names in place of objects."""
    if "X" in settings or "y" in settings:
        raise DataError("give arrays together, as data=(X, y)")
    if "partition" in settings and not isinstance(settings["partition"], str):
        raise ConfigError(
            "partition must be a name, such as 'dirichlet', not a "
            f"{type(settings['partition']).__name__}: to assign rows to clients yourself, give "
            "data=[(X1, y1), (X2, y2)], or group= with the owner of each row"
        )
    if settings.get("rounds") is not None and settings.get("iterations") is not None:
        raise ConfigError("give rounds or iterations, not both")
    if isinstance(data, Mapping) and hasattr(data, "column_names"):  # a DatasetDict of Hugging Face
        raise DataError(
            f"data has the splits {', '.join(map(str, data))}: give one, such as data['train']"
        )
    if {"X", "y"} & ({*data} if isinstance(data, Mapping) else set()):
        raise DataError(
            "give arrays as a tuple, data=(X, y): a table is for settings, such as data={'name': "
            "'mnist'}"
        )
    top = {key: value for key, value in settings.items() if key not in OF_DATA}
    table = {key: value for key, value in settings.items() if key in OF_DATA}
    if data is None or (isinstance(data, str | Path | Mapping) and not objects.is_frames(data)):
        given = (
            {} if data is None else dict(data) if isinstance(data, Mapping) else {"name": str(data)}
        )
        if isinstance(test, int | float):
            given["test_fraction"] = float(test)
        elif test is not None:
            raise DataError(
                "test needs training rows: give data as arrays, a frame or a Dataset too"
            )
        columns = {"label": label, "group": group}
        given |= {key: value for key, value in columns.items() if value is not None}
    else:
        columns = {key: table.pop(key) for key in OF_FRAMES if key in table}
        # names of owners, not a share
        if isinstance(unseen := table.get("unseen"), str | list | tuple):
            columns["unseen"] = (unseen,) if isinstance(unseen, str) else tuple(unseen)
        given = objects.data_settings(data, test=test, label=label, group=group, columns=columns)
    if table or given:
        top["data"] = {**given, **table}
    if models is not None:
        top["models"] = (
            dict(models) if isinstance(models, Mapping) else objects.models_settings(models)
        )
    if pretrained is not None:
        is_table = isinstance(pretrained, Mapping)
        top["pretrained"] = (
            dict(pretrained) if is_table else objects.pretrained_settings(pretrained)
        )
    return top


def execute(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    keep_models: bool = False,
    backend: Callable[..., Backend] = local_backend,
) -> RunResult:
    """Execute one run of a checked config, on any engine: see `fedloom.experiment.run.execute`."""
    if run.engine.name == "net":
        from fedloom.remote import coordinator

        backend = coordinator.backend
    return runs.execute(
        run,
        folder,
        resume=resume,
        progress=progress,
        stop=stop,
        keep_models=keep_models,
        backend=backend,
    )
