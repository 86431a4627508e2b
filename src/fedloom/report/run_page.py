"""The report of one run."""

from collections.abc import Iterable

from fedloom.experiment.run.metrics import parse, shown_metrics
from fedloom.experiment.run.result import RunSummary
from fedloom.report import formatting as fmt
from fedloom.report import unseen, vertical
from fedloom.report.clients import clients_of_run
from fedloom.report.learning import diagnostics, learning
from fedloom.report.mixing import mixing_of_run
from fedloom.report.page import Details, Page, PageSection, PageTable, Tile, cells
from fedloom.report.privacy import leaks, privacy
from fedloom.report.read import Run
from fedloom.report.traffic import traffic


def page(run: Run) -> Page:
    """The page of a run: its sections depend on the setting and on what the run recorded."""
    s = run.summary
    if s.scores:
        blocks = [
            vertical.classes(run),
            vertical.data_of_parties(run),
            vertical.alone(run),
            vertical.attacks(run),
        ]
    else:
        blocks = [unseen.unseen_of_run(run), clients_of_run(run), mixing_of_run(run)]
    sections = [
        learning(run),
        *blocks,
        privacy(run),
        leaks(run),
        _learned(run),
        diagnostics(run),
        traffic(run),
        _failures(run),
        _repeat(run),
    ]
    return Page(
        title=f"{s.name} on {s.dataset}",
        subtitle=" · ".join(
            part
            for part in (
                s.title,
                f"preset {s.preset}",
                f"seed {s.seed}",
                "on validation rows" * bool(s.validation),
                "measured on the rows that were fitted" * s.fitted,
            )
            if part
        ),
        lead=lead(run),
        verdict=_verdict(s),
        warning="" if run.finished else _unfinished(run),
        tiles=[*(vertical.tiles(run) if s.scores else _accuracies(s)), *_costs(s)],
        sections=[section for section in sections if section],
        footer=f"Written by fedloom {run.environment.get('fedloom', '')} from the files in this "
        "run's folder.",
    )


def _verdict(s: RunSummary) -> str:
    reached, chance = s.accuracies[s.main].mean, s.chance_of(s.main)
    if s.task == "number":
        beside = (
            ""
            if chance is None
            else f", {fmt.metric(chance, False)} if always {s.most_frequent(s.main)}"
        )
        unit = f", in the unit of {s.label}" if s.label else ""
        return f"RMSE {fmt.metric(reached, False)}{beside}{unit}"
    over = (
        ""
        if chance is None
        else f", {fmt.points(reached - chance)} over always predicting {s.most_frequent(s.main)}"
    )
    return f"{fmt.percent(reached)} accuracy{over}"


def lead(run: Run) -> str:
    """The result in a sentence."""
    s = run.summary
    length = "one iteration" if s.iterations == 1 else f"{fmt.whole(s.iterations)} iterations"
    if s.scores:
        text = vertical.lead(run, length)
    elif s.eval_modes:
        text = _adapted_lead(s, length)
    else:
        over = " (s.d. over clients)" if s.clients > 1 else ""
        reached = fmt.spread(s.overall.mean, s.overall.std if s.clients > 1 else None, s.main.share)
        who = fmt.capital(fmt.times(s.clients, "client"))
        text = f"{who} reached {_of_number(s)}{reached}{over} on {s.dataset} after {length}"
    main = s.main if s.eval_modes else s.on_test
    chance = s.chance_of(main)
    if chance is None:
        return f"{text}."
    where = "at unseen clients, " if s.unseen and s.eval_modes and s.own else ""
    given = fmt.metric(chance, main.share)
    return f"{text}; {where}always predicting {s.most_frequent(main)} gives {given}."


def _adapted_lead(s: RunSummary, length: str) -> str:
    """The result of clients with an evaluation mode, on their own class mix if they have own test
    rows.
    """
    metric, over = next(iter(s.eval_modes.items()))
    eval_mode = metric.eval_mode
    mine = f"their {s.mine}"
    rows = f"On {mine if s.own else s.tested} of {s.dataset}"
    share = metric.share
    after = f"after {eval_mode}" if eval_mode[:1].isdigit() else eval_mode
    if s.unseen:
        training = s.eval_modes[metric.training]
        return (
            f"{rows}, {fmt.times(len(over.per_client), 'unseen client')} reached {_of_number(s)}"
            f"{fmt.spread(over.mean, over.std, share)} {after}, "
            f"{fmt.times(len(training.per_client), 'training client')} "
            f"{fmt.spread(training.mean, training.std, share)}, in {length} (s.d. over clients)"
        )
    several = s.clients > 1
    new, old = (
        fmt.spread(a.mean, a.std if several else None, share) for a in (over, s.own or s.overall)
    )
    over_clients = " (s.d. over clients)" if several else ""
    text = (
        f"{rows}, {fmt.times(s.clients, 'client')} reached {_of_number(s)}{new}{over_clients} "
        f"{after}"
    )
    return f"{text} and {old} unadapted, after {length}"


def _of_number(s: RunSummary) -> str:
    """The words before an error of a number to predict; "" for an accuracy."""
    return "an RMSE of " if s.task == "number" else ""


def _unfinished(run: Run) -> str:
    done = fmt.times(run.summary.rounds, "round")
    return (
        f"This run is unfinished. The page shows its last evaluation, after {done}. To resume "
        "the run, add --resume to the command that started it."
    )


def _accuracies(s: RunSummary) -> Iterable[Tile]:
    for metric in shown_metrics(s.accuracies, bool(s.unseen)):
        found = s.accuracies[metric]
        plain = metric == s.on_test and not s.eval_modes
        label = fmt.capital(metric.noun if plain else s.describe(metric))
        spread = fmt.standard_deviation(found.std, metric.share)
        note = f"±{fmt.NBSP}{spread} s.d. over clients" if len(found.per_client) > 1 else ""
        yield Tile(label, fmt.metric(found.mean, metric.share), note)
    for text, found in s.client_scores.items() if s.task == "number" else ():
        if not (metric := parse(text)).own:
            yield Tile(metric.noun, fmt.metric(found.mean, False), f"on {s.tested}")
    chance = s.chance_of(s.main)
    if chance is not None:
        yield Tile("Chance", fmt.metric(chance, s.main.share), f"always {s.most_frequent(s.main)}")
    if s.agreement is not None:
        yield Tile("Agreement", fmt.percent(s.agreement), "of answers, between two clients")


def _costs(s: RunSummary) -> Iterable[Tile]:
    parties = "parties" if s.scores else "clients"
    sizes = [
        ("Sent up", s.bytes.up, f"by the {parties}"),
        ("Sent down", s.bytes.down, f"to the {parties}"),
    ]
    sizes += [("Sent across", s.bytes.across, f"between {parties}")] if s.bytes.across else []
    for label, count, note in sizes:
        yield Tile(label, fmt.size(count), note, fmt.exact_bytes(count))
    if s.seconds:
        total = s.seconds.get("total", sum(s.seconds.values()))
        e = s.engine
        where = f"{e.engine} engine, {fmt.times(e.workers, 'worker')}, {e.device}" if e else ""
        yield Tile("Time", fmt.duration(total), where, f"{total:,.2f} seconds")
    yield Tile(
        "Failures",
        fmt.whole(s.failures),
        "calls without a valid reply",
        f"{fmt.whole(s.messages)} messages",
    )


def _learned(run: Run) -> PageSection | None:
    """What the server has learned, as its method says."""
    tables = [
        PageTable(found.title, found.columns, [cells(*map(fmt.value, row)) for row in found.rows])
        for found in run.summary.learned
    ]
    return PageSection("What was learned", tables=tables) if tables else None


def _failures(run: Run) -> PageSection | None:
    if not run.failures:
        return None
    groups: dict[tuple[str, str, str], list[str]] = {}
    for failure in run.failures:
        groups.setdefault((failure.reason, failure.kind, failure.why), []).append(failure.party)
    said = any(why for _, _, why in groups)
    rows = [
        cells(reason, kind, fmt.whole(len(parties)), fmt.whole(len(set(parties))), *[why] * said)
        for (reason, kind, why), parties in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    text = "Missing and invalid replies are dropped; the round continues with the others."
    table = PageTable(
        "Calls without a valid reply",
        ("Reason", "Call", "Calls", "Parties", *["What the node said"] * said),
        rows,
        words=2,
    )
    return PageSection("Failures", text=[text], tables=[table])


def _repeat(run: Run) -> PageSection:
    """The command, config, versions and hashes to repeat the run."""
    s, own = run.summary, run.summary.pretrained
    environment = {
        **run.environment,
        "public_sha256": s.public_sha256,
        "state_sha256": s.state_sha256,
    }
    rows = [cells(key, str(value)) for key, value in environment.items() if value is not None]
    rows += [cells("engine", remark) for remark in (s.engine.remarks if s.engine else ())]
    caption = "Versions and machine, and hashes of the public rows and of all parties' final states"
    text = [
        "With the same versions on the same kind of machine, this command in this folder repeats "
        "the results"
    ]
    text[0] += " with the same state_sha256." if s.state_sha256 else "."
    if own is not None:
        model = f"{own.model or 'unnamed'}{f' (norm {own.norm})' if own.norm else ''}"
        source = f", from the file {own.file}" if own.file else ""
        text.append(
            f"The server's pretrained model is {model}{source}; its digest starts with "
            f"{own.digest[:12]}."
        )
    return PageSection(
        "Reproduce",
        text=text,
        command="fedloom run config.toml",
        details=[
            Details("Resolved config", run.config),
            Details(
                "Environment and hashes", table=PageTable(caption, ("Name", "Value"), rows, words=2)
            ),
        ],
    )
