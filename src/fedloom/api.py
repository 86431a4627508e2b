"""Run and compare from Python, with names, files, or objects of a notebook.

result = fedloom.run("fedal", rounds=20, seed=1)
result.accuracy, result.summary["bytes"]["up"]

result = fedloom.run("fedavg", data=(X, y), models=net, clients=5, rounds=20)
result.models[0](torch.from_numpy(X))

comparison = fedloom.compare(["fedal", "fedmd", "local"], seeds=[0, 1, 2], iterations=200)
comparison["differences"]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.method import Method
from fedloom.experiment.config import objects
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.run import Experiment, RunConfig
from fedloom.experiment.plan.reading import check, read
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.compare import execute_all
from fedloom.experiment.run.engine import Backend, local_backend
from fedloom.experiment.run.execute import RunResult, Status, Stopped, settle
from fedloom.experiment.run.metrics import GLOBAL, SCORES, in_words
from fedloom.experiment.run.result import RunSummary
from fedloom.experiment.run.trained import TrainedModels

if TYPE_CHECKING:
    import pandas

__all__ = ["Experiment", "Result", "RunConfig", "Status", "Stopped", "compare", "execute", "read", "run"]

OF_FRAMES = ("id", "drop", "keep", "missing", "task", "missing_words", "decimal")
"""Keywords that describe a frame's columns."""
OF_DATA = frozenset(DataConfig.model_fields) - frozenset(RunConfig.model_fields)
"""Settings of `[data]` that `run` and `compare` take as keywords, too."""


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """A finished run. It prints in five lines.

    Attributes:
        summary: the content of `result.json`.
        rows: (round, iteration, stage, party, metric, value) of every measurement; `metrics` is the same as a frame.
        folder: the run folder; None if nothing was written.
    """

    summary: dict[str, Any]
    rows: list[list[Any]]
    folder: Path | None
    _trained: TrainedModels

    @property
    def accuracy(self) -> float:
        """Mean over clients of the final accuracy on the global test set.

        Raises:
            ConfigError: the label is a number, see `rmse`.
        """
        if "accuracy" not in self.summary:
            raise ConfigError("the label of this run is a number, which has no accuracy: see result.rmse")
        return float(self.summary["accuracy"]["mean"])

    @property
    def rmse(self) -> float:
        """Mean over clients of the final root mean squared error on the global test set, in the unit of the label.

        Raises:
            ConfigError: the label has classes, see `accuracy`.
        """
        if "rmse" not in self.summary:
            raise ConfigError("the label of this run has classes and no error in a unit: see result.accuracy")
        return float(self.summary["rmse"]["mean"])

    @cached_property
    def models(self) -> list[nn.Module]:
        """The trained network of each client, in evaluation mode on the CPU, as the run's main metric evaluates it, so
        after fine-tuning if the method fine-tunes.

        Raises:
            DataError: the models are at nodes.
        """
        return [self._trained.client(i) for i in range(self.summary["clients"])]

    @cached_property
    def model(self) -> nn.Module | None:
        """The model that all clients share, such as the server's average; None if each client has its own."""
        return self._trained.common()

    @cached_property
    def metrics(self) -> "pandas.DataFrame":
        """Every measurement: round, iteration, stage, party ("" for all), metric and value. A client has the name of
        the owner of its rows, if it is known."""
        columns, names = ["round", "iteration", "stage", "party", "metric", "value"], self._trained.names
        rows = [[*row[:3], names.get(row[3], row[3]), *row[4:]] for row in self.rows]
        return _pandas().DataFrame(rows, columns=columns)

    @cached_property
    def clients(self) -> "pandas.DataFrame":
        """One row for each client: its network, number of training rows, whether it is unseen, and its
        final measurements."""
        last = max((row[0] for row in self.rows), default=0)
        stage = self.rows[-1][2] if self.rows else ""
        found = [
            {"client": name, "network": network, "rows": rows, "unseen": i in self.summary.get("unseen", [])}
            for i, (name, network, rows) in enumerate(self._trained.parties())
        ]
        places = {entry["client"]: entry for entry in found}
        for round, _, at, party, metric, value in self.rows:
            if (round, at) == (last, stage) and party in places:
                places[party][metric] = value
        for entry in found:
            entry["client"] = self._trained.names[str(entry["client"])]
        return _pandas().DataFrame(found)

    def to_frame(self) -> "pandas.DataFrame":
        """What the server has learned: the coefficients of a linear model with standard errors, p-values and intervals,
        or the importance of each column of trees. Tables with other columns than the first, such as that of the fit,
        are in `summary["learned"]`.

        Raises:
            ConfigError: the method reports no table.
        """
        tables = self.summary.get("learned", [])
        if not tables:
            raise ConfigError(f"{self.summary['method']} reports no table of what it has learned")
        columns = tables[0]["columns"]
        alike = [table for table in tables if table["columns"] == columns]
        rows = [[*([table["title"]] if len(alike) > 1 else []), *row] for table in alike for row in table["rows"]]
        return _pandas().DataFrame(rows, columns=[*(["Table"] if len(alike) > 1 else []), *columns])

    def report(self) -> Path:
        """Write the HTML page of the run into its folder; returns its path.

        Raises:
            ConfigError: the run has no folder.
        """
        from fedloom import report

        return report.write(self._written)

    def export(self, out: str | Path, *, force: bool = False) -> Path:
        """Write a folder for each trained model, which plain PyTorch opens, as `fedloom export` does; returns `out`.

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
            beside = "" if chance is None else f", {s.most_frequent(metric)} {in_words(metric, chance)}"
            shown = in_words(metric, found.mean)
            shown += f" ± {in_words(metric, found.std)} over clients" if len(found.per_client) > 1 else ""
            name = SCORES[s.on_test].title if s.task == "number" else "accuracy"
            lines.append(f"  {name} {s.describe(metric)}: {shown}{beside}")
        if s.scores:
            lines.append("  " + ", ".join(f"{name} {value:.3f}" for name, value in s.scores.items() if name != GLOBAL))
        lines.append(
            f"  sent {s.bytes.up / 1e6:,.2f} MB to the server, {s.bytes.down / 1e6:,.2f} MB back, "
            f"{s.bytes.across / 1e6:,.2f} MB between clients; {s.failures} failed calls"
        )
        lines.append(f"  {s.seconds['total']:,.1f} s; {self.folder or 'no folder'}")
        return "\n".join(lines)


class CompareResult(dict[str, Any]):
    """The content of `comparison.json`. It prints the verdict and the differences with their 95 % intervals."""

    def __repr__(self) -> str:
        from fedloom.experiment.run.result import Comparison
        from fedloom.report.results import conclusion
        from fedloom.report.terminal import line

        differences = Comparison.model_validate(self).differences
        return "\n  ".join([line(self), *(conclusion(one) for one in differences)])


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("metrics and clients are data frames: pip install pandas, or use result.rows") from None
    return pandas


def run(
    config: RunConfig | Method | str | Path,
    *,
    data: Any = None,
    test: Any = None,
    label: str | None = None,
    group: Any = None,
    models: Any = None,
    pretrained: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    trust: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Execute one run.

    Objects are copied and recorded: the run folder has their fingerprints, shapes and classes in `objects.json`, and
    the same script can resume the run.

    Args:
        config: a method (its name, page or `Method`), a `RunConfig`, the path of a TOML file, or the name of an
            experiment.
        data: the rows: arrays (X, y), a data frame, a torch Dataset, or a list with one of these for each client; the
            name or path of a data set; or a table of settings. Arrays and Datasets reach the networks as they are
            (bytes of images as 0 to 1), and columns of frames are encoded and standardized.
        test: the test rows in the same form as one client's, or the share of rows to hold out (default 0.25); of a
            frame also the column that says train or test, or names of owners.
        label: the column of a frame or file that is predicted.
        group: the owner of each row, each of whom is a client: a column of a frame or file, or an array (n,).
        models: a module, a factory (called with input shape and number of classes, or without arguments) or a name for
            all clients, or a list with one for each; or a table of settings. Clients start with a module's weights.
        pretrained: the server's pretrained model: a module, a name, or a table of settings.
        out: the run folder; None writes nothing.
        resume: continue the run in `out`.
        progress: called after each round.
        trust: code that a TOML file outside the working folder may name, such as "mine.py" or "package.module:name".
        **settings: further settings, such as `seed=1`, `params={"tau": 5}`, and those of `[data]`, such as `clients=5`,
            or for a frame `missing="median"`, `drop=["after_*"]`, `keep`, `id` and `unseen=["va"]`. With a `RunConfig`,
            a table replaces the whole table.

    Raises:
        FedloomError: the config, an object or a checkpoint is invalid.
    """
    settings = _named(settings, data, test, label, group, models, pretrained)
    if isinstance(config, Method):
        config = check({"run": {"method": objects.method_name(config), "name": config.name, **settings}}).run
    elif isinstance(config, RunConfig):
        config = check({"run": {**config.model_dump(), **settings}}).run
    else:
        experiment = read(str(config), flags=settings, trust=trust)
        if experiment.compare is not None:
            raise ConfigError(f"{config} is a comparison: use fedloom.compare({str(config)!r})")
        config = experiment.run
    folder = _settled(out, resume)
    found = execute(config, folder, resume=resume, progress=progress, keep_models=True)
    assert found.trained is not None
    return Result(found.summary, found.metrics, found.folder, found.trained)


def compare(
    methods: str | Path | Sequence[str | Method | dict[str, Any]],
    *,
    seeds: Sequence[int] | None = None,
    data: Any = None,
    test: Any = None,
    label: str | None = None,
    group: Any = None,
    models: Any = None,
    pretrained: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    trust: Sequence[str] = (),
    **settings: Any,
) -> CompareResult:
    """Execute several methods and seeds on identical splits; returns the content of `comparison.json`.

    Each of its `differences` has the 95 % `interval` of the mean over seeds, if there are several.

    Args:
        methods: names, `Method` objects, or tables of `method`, `preset`, `params`, `name`; the first is the reference.
            Or the name or TOML file of a comparison.
        seeds: one run for each method and seed; None for those of the comparison, or 0.
        data, test, label, group, models, pretrained, out, resume, progress, trust, **settings: see `run`.

    Raises:
        FedloomError: see `run`.
    """
    if isinstance(seeds, int):
        raise ConfigError(f"seeds must be a list, such as [0, 1, 2], not {seeds}")
    settings = _named(settings, data, test, label, group, models, pretrained)
    if isinstance(methods, str | Path):
        config = read(str(methods), flags=settings, trust=trust)
        if config.compare is None:
            raise ConfigError(f"{methods} is a single run: use fedloom.run({str(methods)!r})")
        run_values, compared = config.run.model_dump(), config.compare.model_dump()
    else:
        run_values, compared = settings, {"methods": [_entry(method) for method in methods]}
    experiment = check({"run": run_values, "compare": {**compared, **({"seeds": list(seeds)} if seeds else {})}})
    folder = _settled(out, resume, several=True)
    return CompareResult(execute_all(experiment, folder, resume=resume, progress=progress, execute=execute))


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
    return method if isinstance(method, str) else dict(method)


def _named(
    settings: Mapping[str, Any], data: Any, test: Any, label: str | None, group: Any, models: Any, pretrained: Any
) -> dict[str, Any]:
    """The settings with names in place of objects."""
    top = {key: value for key, value in settings.items() if key not in OF_DATA}
    table = {key: value for key, value in settings.items() if key in OF_DATA}
    if data is None or isinstance(data, str | Path | Mapping):
        given = {} if data is None else dict(data) if isinstance(data, Mapping) else {"name": str(data)}
        if isinstance(test, float):
            given["test_fraction"] = test
        elif test is not None:
            raise DataError("test needs training rows: give data as arrays, a frame or a Dataset too")
        columns = {"label": label, "group": group}
        given |= {key: value for key, value in columns.items() if value is not None}
    else:
        columns = {key: table.pop(key) for key in OF_FRAMES if key in table}
        if isinstance(unseen := table.get("unseen"), str | list | tuple):  # names of owners, not a share
            columns["unseen"] = (unseen,) if isinstance(unseen, str) else tuple(unseen)
        given = objects.data_settings(data, test=test, label=label, group=group, columns=columns)
    if table or given:
        top["data"] = {**given, **table}
    if models is not None:
        top["models"] = dict(models) if isinstance(models, Mapping) else objects.models_settings(models)
    if pretrained is not None:
        is_table = isinstance(pretrained, Mapping)
        top["pretrained"] = dict(pretrained) if is_table else objects.pretrained_settings(pretrained)
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
        run, folder, resume=resume, progress=progress, stop=stop, keep_models=keep_models, backend=backend
    )
