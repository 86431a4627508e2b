"""Compares several methods and seeds on identical splits, by paired differences.

`execute_all` executes the runs of an experiment, and `compare` makes their summaries one
`Comparison`, the content of `comparison.json`. For runs that finished apart,
`fedloom.report.gather` calls `compare` alone.

Runs are grouped by their name, which is the method's unless the user gave another: one group for
each line of the results, with a run for each seed. Runs of one seed have the same data, split and
clients, so the difference of two methods is taken seed by seed and client by client.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError, MethodError, TrainingDiverged
from fedloom.core.statistics import confidence_interval
from fedloom.experiment.config.run import Experiment, folder_name
from fedloom.experiment.run.execute import RunResult, Status, execute
from fedloom.experiment.run.fairness import HINT, unequal
from fedloom.experiment.run.fairness import remarks as fairness_remarks
from fedloom.experiment.run.lockstep import execute_lots
from fedloom.experiment.run.metrics import MAIN_MODE, SCORES, Metric
from fedloom.experiment.run.record import write_json
from fedloom.experiment.run.result import (
    ComparedRun,
    Comparison,
    LeftOutRun,
    MethodSummary,
    NetworkGain,
    PairedDifference,
    RunSummary,
    SeedSpread,
    SoloOverSeeds,
    Spread,
    Traffic,
    shared_metrics,
)
from fedloom.experiment.run.tuning import TUNING, tuned

SAME = ("dataset", "clients", "public_sha256", "test_sha256")
"""Keys of `result.json` in which runs of one seed must agree to be paired."""


def execute_all(
    experiment: Experiment,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., RunResult] = execute,
    tune: bool = False,
) -> dict[str, Any]:
    """Execute all runs of a comparison and write `comparison.json`; returns its content.

    With `resume`, an unfinished run continues from its checkpoint. `execute` executes one run. With
    `tune` the learning rate of each method is chosen first, by runs in the folder `TUNING`: see
    `tuned`.

    A run that diverges, or whose method fails, is left out, and named in `left_out`.

    Raises:
        ConfigError: two runs have one folder; or some methods are horizontal, others vertical.
        MethodError: every run has failed.
    """
    options: dict[str, Any] = {
        "execute": execute,
        "resume": resume,
        "progress": progress,
        "stop": stop,
    }
    remarked: list[str] = []
    if tune:
        experiment, remarked = tuned(experiment, folder and folder / TUNING, **options)
    runs = experiment.runs()
    methods = [run.resolve()[0] for run in runs]
    _check_one_setting({method.name: method.setting for method in methods})
    names = [folder_name(run) for run in runs]
    folders = [folder / name if folder else None for name in names]
    ended = execute_lots(runs, folders, **options)
    errors = {n: one for n, one in enumerate(ended) if isinstance(one, MethodError)}
    results = [one for one in ended if not isinstance(one, MethodError)]
    if not results:
        raise next(iter(errors.values()))
    failed = [
        LeftOutRun(
            name=runs[n].label,
            seed=runs[n].seed,
            folder=names[n] if folder else None,
            diverged=isinstance(error, TrainingDiverged),
            reason=str(error),
        )
        for n, error in errors.items()
    ]
    if len(runs) > 1 and all(result.summary["diverged"] for result in results):
        raise TrainingDiverged(
            f"every run diverged or failed; the first: {results[0].summary['diverged']}"
        )
    content = summarize(experiment.title, results, failed)
    made = [text for text in content["remarks"] if not remarked or HINT not in text]
    content["remarks"] = [*remarked, *made]
    if folder is not None:
        write_json(folder / "comparison.json", content)
    return content


def summarize(
    title: str, results: Sequence[RunResult], failed: Sequence[LeftOutRun] = ()
) -> dict[str, Any]:
    """The content of `comparison.json`, given finished runs and the failed ones: see `compare`."""
    summaries = [RunSummary(**result.summary) for result in results]
    return compare(title, summaries, [result.folder for result in results], failed).content()


def compare(
    title: str,
    summaries: Sequence[RunSummary],
    folders: Sequence[Path | None],
    failed: Sequence[LeftOutRun] = (),
    main: Metric | None = None,
) -> Comparison:
    """Average each method over its seeds, and compare each with the first by paired differences.

    `shared_metrics` says what the main metric is. Runs that diverged are left out, unless all did.

    Args:
        title: of the comparison.
        summaries: of the runs; those of one seed must be on the same data.
        folders: of the runs.
        failed: the runs that have no summary.
        main: the main metric, if it is that of more runs than these.

    Raises:
        ConfigError: runs of one seed differ in data, public rows, clients or unseen clients; some
            methods are horizontal, others vertical; or only some runs have unseen clients.
    """
    # Refuse runs that measure different things. Not every run knows every key, as the rows of nodes
    # have no hash here: None agrees with all.
    if len({summary.task for summary in summaries}) > 1:
        raise ConfigError("runs cannot be compared: some predict a number, others classes")
    _check_one_setting(
        {summary.name: "vertical" if summary.scores else "horizontal" for summary in summaries}
    )
    for seed in {summary.seed for summary in summaries}:
        of_seed = [summary for summary in summaries if summary.seed == seed]
        for key in SAME:  # the same within a seed only: each seed has a split of its own
            values = {
                str(getattr(summary, key))
                for summary in of_seed
                if getattr(summary, key) is not None
            }
            if len(values) > 1:
                raise ConfigError(
                    f"runs of seed {seed} cannot be compared: {key} is "
                    f"{' and '.join(sorted(values))}"
                )
        unseen = sorted({tuple(summary.unseen) for summary in of_seed})
        if len(unseen) > 1:
            those = " and ".join(", ".join(map(str, clients)) or "none" for clients in unseen)
            raise ConfigError(
                f"runs of seed {seed} cannot be compared: the unseen clients are {those}"
            )
    if len({bool(summary.unseen) for summary in summaries}) > 1:
        raise ConfigError("runs cannot be compared: some have unseen clients, others none")

    # Leave out what diverged. If all did, all are kept, so that there is something to show; the
    # list of runs that were left out names them all the same.
    # `_name` is the last part of a run's folder, or None if nothing was written.
    every = list(zip(summaries, folders, strict=True))
    usable = [one for one in every if not one[0].diverged] or every
    left_out = [
        *failed,
        *(
            LeftOutRun(
                name=summary.name,
                seed=summary.seed,
                folder=_name(folder),
                diverged=True,
                reason=summary.diverged,
            )
            for summary, folder in every
            if summary.diverged
        ),
    ]

    # The runs of each name, one for each seed, in the order of the experiment: the first name is
    # what all others are compared with.
    summaries = [summary for summary, _ in usable]
    groups: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.name, []).append(summary)
    reference, *others = groups
    # the metrics that all runs have, the main one first
    first_metric, *further = shared_metrics(summaries)
    main = main or first_metric
    # the test rows in words, such as "the global test set"
    tested = {summary.tested for summary in summaries}
    # gains of networks are told over training alone, where that is compared
    baseline = next(
        (name for name, group in groups.items() if group[0].method == "local"), reference
    )

    def differences(metric: Metric) -> list[PairedDifference]:
        return [_difference(groups[reference], groups[name], metric) for name in others]

    return Comparison(
        title=title,
        reference=reference,
        methods=[_method(name, group, main, groups[baseline]) for name, group in groups.items()],
        gains_over=baseline,
        # fields with a default are left out, not set to None, if runs do not agree or have none
        **({"tested": tested.pop()} if len(tested) == 1 else {}),
        # whether clients are the owners of their rows
        natural=all(summary.natural for summary in summaries),
        unseen={str(summary.seed): summary.unseen for summary in summaries if summary.unseen},
        metric=main,
        differences=differences(main),
        further={metric: differences(metric) for metric in further},
        lower_is_better=[metric for metric in (main, *further) if metric.lower_is_better],
        # what makes it unfair: more steps, larger networks or more rows of a method; clients with a
        # value of the main metric; seeds of which a run is left out
        unequal=[
            *unequal(summaries),
            *_clients_evaluated(groups, main),
            *_seeds_missing(left_out, groups),
        ],
        # why runs are left out; then warnings, such as that validation rows were tested on
        remarks=[*_reasons(left_out), *remarks(summaries)],
        runs=[
            ComparedRun(name=summary.name, seed=summary.seed, folder=_name(folder))
            for summary, folder in usable
        ],
        **({"left_out": left_out} if left_out else {}),
    )


def _name(folder: Path | None) -> str | None:
    """A run's folder within that of the comparison; None if nothing was written."""
    return folder.name if folder else None


def _seeds_missing(
    left_out: Sequence[LeftOutRun], groups: Mapping[str, Sequence[RunSummary]]
) -> list[str]:
    """The methods of which only some seeds are left, which favors them."""
    gone = {
        one.name: sum(other.name == one.name for other in left_out)
        for one in left_out
        if one.name in groups
    }
    return [
        f"{name} without {count} of {count + len(groups[name])} seeds"
        for name, count in gone.items()
    ]


def _reasons(left_out: Sequence[LeftOutRun]) -> list[str]:
    """Why runs are left out, those of one method and reason together."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        start = f"{one.name} {'diverged' if one.diverged else 'failed'}"
        seeds.setdefault((start, one.reason), []).append(str(one.seed))
    return [
        f"{start} with seed{'s' * (len(each) > 1)} {', '.join(each)}: {reason}"
        for (start, reason), each in seeds.items()
    ]


def _check_one_setting(settings: Mapping[str, str]) -> None:
    """Refuse a mix of horizontal and vertical methods, given the setting of each."""
    first = {setting: name for name, setting in reversed([*settings.items()])}
    if len(first) > 1:
        vertical, horizontal = first["vertical"], first["horizontal"]
        raise ConfigError(
            f"{vertical} cannot be compared with {horizontal}: its parties hold different "
            "columns and give one answer together, those of the other hold different rows and "
            "answer one by one; compare methods of one kind"
        )


def remarks(summaries: Sequence[RunSummary]) -> list[str]:
    """Warnings: results on validation rows, how to train equally long, and runs of one method and
    seed that have different pretrained models.
    """
    made = fairness_remarks(summaries)
    if shares := sorted({s.validation for s in summaries if s.validation}):
        share = " and ".join(f"{100 * share:g} %" for share in shares)
        made.append(
            f"measured on validation rows, {share} of the training rows, and not on the test rows"
        )
    if any(s.fitted for s in summaries):
        made.append(
            "measured on the rows that were fitted, as none were held out: set data.test_fraction, "
            "such as 0.25, to measure on others"
        )
    found: dict[tuple[str, int], dict[str, str]] = {}
    for s in summaries:
        own = s.pretrained
        model = f"{own.model or 'one'} ({own.digest[:12]})" if own else "none"
        found.setdefault((s.method, s.seed), {})[own.digest if own else ""] = model
    made += [
        f"runs of {method} with seed {seed} have different pretrained models at the server: "
        f"{', '.join(each.values())}"
        for (method, seed), each in found.items()
        if len(each) > 1
    ]
    return made


def _clients_evaluated(groups: Mapping[str, Sequence[RunSummary]], main: Metric) -> list[str]:
    """The number of clients that have a value of the main metric, if it differs."""
    counts = {name: sorted({len(_each(s, main)) for s in group}) for name, group in groups.items()}
    if len({*map(tuple, counts.values())}) == 1:
        return []
    shown = (f"{name} {' or '.join(map(str, count))}" for name, count in counts.items())
    return [f"clients that were evaluated: {', '.join(shown)}"]


def _method(
    name: str, group: Sequence[RunSummary], main: Metric, baseline: Sequence[RunSummary]
) -> MethodSummary:
    """The summary of one method over its seeds; `baseline`: runs that gains are computed over."""
    first = group[0]
    found = {
        metric: _over_seeds([s.compared[metric] for s in group]) for metric in shared_metrics(group)
    }
    return MethodSummary(
        name=name,
        method=first.method,
        paper=first.paper,
        preset=first.preset,
        seeds=[s.seed for s in group],
        **({"task": first.task} if first.task == "number" else {}),
        **{
            first.on_test.name: found[first.on_test],
            f"own_{first.on_own.name}": found.get(first.on_own),
        },
        scores=found if first.scores else {},
        alone=_alone(group),
        eval_modes={metric: found[metric] for metric in first.eval_modes if metric in found},
        **(
            {
                "mode": first.called(main).mode,
                "main": _over_seeds([one for s in group if (one := s.of(main))]),
            }
            if main.mode == MAIN_MODE
            else {}
        ),
        networks=network_means(group, main, baseline),
        chance=_mean([s.chance for s in group]),
        own_chance=_mean_if_all([s.own_chance for s in group]),
        own_chances=_own_chances(group),
        bytes=Traffic(
            **{
                name: _mean([getattr(s.bytes, name) for s in group])
                for name in Traffic.model_fields
            }
        ),
        seconds=_mean([s.seconds["total"] for s in group]),
        failures=sum(s.failures for s in group),
        **({"private_rows": True} if first.private_rows else {}),
    )


def network_means(
    group: Sequence[RunSummary], metric: Metric, baseline: Sequence[RunSummary] = ()
) -> dict[str, NetworkGain]:
    """The mean of a metric over the clients of each network or black box in all seeds, and its gain
    over the same clients and seeds of `baseline`, where these have the same network. Empty for one
    network or a joint prediction.
    """
    values, before = _by_model(group, metric), _by_model(baseline, metric)
    found = {}
    for name, each in sorted(values.items()):
        gains = [
            value - before[name][key] for key, value in each.items() if key in before.get(name, {})
        ]
        found[name] = NetworkGain(
            clients=len(each), mean=_mean([*each.values()]), gain=_mean(gains) if gains else None
        )
    return found if len(found) > 1 else {}


def _by_model(
    group: Sequence[RunSummary], metric: Metric
) -> dict[str, dict[tuple[int, int], float]]:
    """A metric by the client's network, then by seed and client. Unseen clients count only in
    metrics over them.
    """
    each: dict[str, dict[tuple[int, int], float]] = {}
    for s in group:
        if s.scores or not s.architectures:
            return {}
        found = s.of(metric)
        for i, value in _each(s, metric).items():
            if (found and found.clients is not None) or i not in s.unseen:
                each.setdefault(s.architectures[i], {})[s.seed, i] = value
    return each


def _own_chances(group: Sequence[RunSummary]) -> dict[str, float]:
    """The chance level over unseen, and over training clients; without those that a seed lacks."""
    means = {
        key: _mean_if_all([s.own_chances.get(key) for s in group]) for key in group[0].own_chances
    }
    return {key: mean for key, mean in means.items() if mean is not None}


def _alone(group: Sequence[RunSummary]) -> dict[str, SoloOverSeeds]:
    """The accuracy of parties that predict alone, in each evaluation mode."""
    found = {}
    for eval_mode in group[0].alone:
        test = [s.alone[eval_mode].test for s in group]
        own = [one for s in group if (one := s.alone[eval_mode].own) is not None]
        found[eval_mode] = SoloOverSeeds(
            test=_over_seeds(test), own=_over_seeds(own) if len(own) == len(test) else None
        )
    return found


def _over_seeds(found: Sequence[Spread]) -> SeedSpread:
    """A metric over seeds."""
    means = [one.mean for one in found]
    return SeedSpread(
        mean=_mean(means),
        std_over_seeds=_deviation(means),
        std_over_clients=_mean([one.std for one in found]),
    )


def _difference(
    first: Sequence[RunSummary], other: Sequence[RunSummary], metric: Metric
) -> PairedDifference:
    """First minus other, per seed and per client."""
    by_seed = {s.seed: s for s in other}
    pairs = [(s, by_seed[s.seed]) for s in first if s.seed in by_seed]
    per_seed, per_client = [], []
    for a, b in pairs:
        of_a, of_b = _each(a, metric), _each(b, metric)
        common = [i for i in of_a if i in of_b]
        per_client += [of_a[i] - of_b[i] for i in common]
        # Where a client has a value in one run only, the runs' means are of different clients, and
        # their difference is not paired. A joint prediction has a mean, but no clients.
        if common and of_a.keys() != of_b.keys():
            per_seed.append(_mean([of_a[i] - of_b[i] for i in common]))
        else:
            per_seed.append(a.of(metric).mean - b.of(metric).mean)  # type: ignore[union-attr]
    sign = -1 if metric.lower_is_better else 1
    ends = confidence_interval(per_seed, SCORES[Metric(metric.name)].largest)
    return PairedDifference(
        first=first[0].name,
        other=other[0].name,
        mean=_mean(per_seed) if per_seed else None,
        std_over_seeds=_deviation(per_seed),
        std_over_clients=float(np.std(per_client)) if per_client else None,
        clients_better=int(np.sum(np.array(per_client) * sign > 0)),
        clients=len(per_client),
        clients_level=per_client.count(0.0),
        per_seed=per_seed,
        interval=None if ends is None else [*ends],
    )


def _each(s: RunSummary, metric: Metric) -> dict[int, float]:
    """The values of a metric of a comparison by client."""
    found = s.of(metric)
    if found is None:
        return {}
    clients = range(len(found.per_client)) if found.clients is None else found.clients
    return dict(zip(clients, found.per_client, strict=True))


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return _mean(known) if len(known) == len(values) else None


def _deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
