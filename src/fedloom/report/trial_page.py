"""The page of a trial: one card for each owner."""

import shlex
from collections.abc import Sequence

from markupsafe import Markup, escape

from fedloom._version import __version__
from fedloom.experiment.trial import OwnerCard, TrialResult
from fedloom.experiment.trial.words import (
    COMPARE,
    LOSSES,
    RELATIVE,
    adds_nothing,
    answer,
    contents,
    evidence_of,
    heading,
    method_title,
    next_step,
    score_name,
    sentence,
    shown_gain,
    shown_score,
    signed,
    some,
    titles,
)
from fedloom.report import formatting as fmt
from fedloom.report.page import (
    Details,
    Figure,
    Page,
    PageCell,
    PageSection,
    PageTable,
    Tile,
    cells,
    render,
)

LONGEST = 26
"""Characters of an owner's name in the picture of gains."""
FEW = 4
"""Owners that a tile or a cell names, at most."""
WIDEST = 12
"""Owners of the largest matrix of partners that the page shows; trial.json has larger ones."""
COLORS = {
    "join": "var(--s3)",
    "same": "var(--s1)",
    "alone": "var(--s2)",
    "undecided": "var(--soft)",
    "too few": "var(--soft)",
}


def html(result: TrialResult, name: str, recipe: str = "recipe.toml") -> str:
    """The page as HTML. `name` is that of the data, `recipe` the path of the file that has the
    recipe.
    """
    return render(page(result, name, recipe))


def page(result: TrialResult, name: str, recipe: str = "recipe.toml") -> Page:
    """The page of a trial: see `html`."""
    counts = {
        kind: [n for n, card in result.owners.items() if card.decision == kind] for kind in COLORS
    }
    card = next(iter(result.owners.values()))
    metric, gain = score_name(result.metric), result.overall["gain"]
    told = [
        ("join", counts["join"]),
        ("no difference", counts["same"]),
        ("stay alone", counts["alone"]),
        ("undecided", counts["undecided"]),
        ("too few rows", counts["too few"]),
    ]
    tiles = [
        *(Tile(said, str(len(owners)), some(owners, FEW)) for said, owners in told if owners),
        Tile(
            f"{'gain' if result.by_columns else 'mean gain'} in {metric}",
            "–" if gain is None else shown_gain(gain, result.metric),
            "all people" if result.by_columns else "over owners",
        ),
    ]
    if result.by_columns:
        return Page(
            title=f"Do other columns help? {name}",
            subtitle=f"{result.split}, seed {result.seed}, {fmt.duration(result.seconds)}; fedloom "
            f"{__version__}",
            lead=answer(result),
            tiles=tiles[-1:],
            sections=[
                _cards(result, metric),
                PageSection(
                    "What next",
                    text=["This measures methods of columns:"],
                    command=f"{COMPARE} {shlex.quote(recipe)}",
                ),
                *_notes(result),
                _methods(result),
            ],
        )
    return Page(
        title=f"Should they federate? {name}",
        subtitle=f"{len(result.owners)} owners, {result.split}, seed {result.seed}, "
        f"{fmt.duration(result.seconds)}; fedloom {__version__}",
        lead=answer(result),
        tiles=tiles,
        sections=[
            _cards(result, metric),
            _next(result, recipe),
            *_notes(result),
            *_partners(result),
            _reveals(result, card),
            _methods(result),
        ],
    )


def _partners(result: TrialResult) -> list[PageSection]:
    """How each owner's model does on the others' rows, and whose model helps whom; [] if it is not
    known.
    """
    names = list(result.owners)
    found = {n: c.partners for n, c in result.owners.items() if c.partners is not None}
    if not found or len(names) > WIDEST:
        return []
    rows = []
    for i, name in enumerate(names):
        one = found[name]
        found_help = zip(names, one.help, strict=False)
        helps = [other for other, value in found_help if value > 0 and other != name]
        advice = f"{', '.join(one.advised)} ({signed(one.gain)})" if one.gain is not None else "–"
        rows.append(
            cells(
                name,
                *(
                    PageCell(_of_partner(one.scores, j, i, result.metric))
                    for j in range(len(names))
                ),
                PageCell(some(helps, FEW) or "–"),
                PageCell(advice),
            )
        )
    caption = (
        f"Each row: the {score_name(result.metric)} of an owner's rows by its own model, and how "
        "far the model of each other owner is from it "
        f"({'less' if result.metric in LOSSES else 'more'} is better). Helped by: without these "
        "owners' models, the loss of the mean of all models rises, so they are missed if they "
        "leave. Better group: owners whose exchange of models is shown to be better than training "
        "alone and than the best federated of all, with the gain over the better of both."
    )
    head = ("rows of", *(f"model of {name}" for name in names), "helped by", "better group")
    return [PageSection("Partners", text=[], tables=[PageTable(caption, head, rows, words=1)])]


def _of_partner(scores: Sequence[float | None], j: int, me: int, metric: str) -> str:
    """The score of owner `me` by its own model, or how much more owner j's model has; of a loss
    more is worse.
    """
    score, own = scores[j], scores[me]
    if score is None or own is None:
        return "–"
    if j == me:
        return shown_score(own, metric)
    if metric in RELATIVE:
        return f"{'+' if score < own else '−'}{shown_score(-abs(score - own), metric)}"
    return signed(own - score if metric in LOSSES else score - own)


def _cards(result: TrialResult, metric: str) -> PageSection:
    rows, calibrated = [], any(card.calibration for card in result.owners.values())
    for name, card in zip(titles(result), result.owners.values(), strict=True):
        values = (card.alone, card.federated, card.pooled)[: 2 if result.by_columns else 3]
        scores = [shown_score(value, result.metric) for value in values]
        rows.append(
            cells(
                PageCell(name),
                PageCell(
                    heading(card),
                    strong=card.decision == "join",
                    below=evidence_of(card, result.metric),
                ),
                PageCell(next_step(card, by_columns=result.by_columns)),
                PageCell(f"{card.rows:,}"),
                *(PageCell(score) for score in scores),
                *([PageCell(_calibration(card))] if calibrated else []),
            )
        )
    caption = (
        f"{metric[0].upper()}{metric[1:]} of every row, by models that did not see it. P: "
        "probability."
    )
    if calibrated:
        caption += (
            f" Calibration: how far probabilities are from what comes true, alone and "
            f"{'joint' if result.by_columns else 'federated'}; 0 is perfect."
        )
    plot = Figure(
        f"Gain in {metric}: {_measured(result)}",
        _forest_plot(result),
        caption=f"The gain{'' if result.by_columns else ' by own rows'} and its 95 % interval. "
        f"Dashed: the smallest gain that is worth it, {_amount(result.worth, 'g', result)}.",
        wide=True,
    )
    people = ("people", "decision", "next", "rows", "alone", "joint")
    owners = ("owner", "decision", "next", "rows", "alone", "federated", "pooled")
    head = (*(people if result.by_columns else owners), *(["calibration"] if calibrated else []))
    table = PageTable(caption, head, rows, words=3)
    return PageSection(
        "People" if result.by_columns else "Owners",
        text=[_sides(result)],
        figures=[plot],
        tables=[table],
    )


def _sides(result: TrialResult) -> str:
    """What is compared."""
    if result.by_columns:
        return (
            "Alone: models of the first file's columns. Joint: models of all files' columns in "
            "one place."
        )
    return (
        "Alone: the best model of an owner's own rows. Federated: the best model that the owners "
        "train together by messages, while rows stay where they are. Pooled: models of all rows "
        "in one place, only to compare."
    )


def _next(result: TrialResult, recipe: str) -> PageSection:
    """How to train what is best, and what to do with each answer."""
    card, points = next(iter(result.owners.values())), []
    found = {card.decision for card in result.owners.values()}
    if "join" in found:
        points.append("Join: owners who join train together, and compare on their next rows.")
    if "undecided" in found:
        points.append(
            "Undecided: these rows show neither that joining helps nor that it does not. Collect "
            "the rows that the table names and try again, or decide by what joining costs."
        )
    if found & {"same", "alone"}:
        points.append(
            "No difference, or stay alone: train alone. Others may still gain from your model."
        )
    text = f"Best federated: {card.method} ({method_title(result)})."
    more = (
        "The command trains the best federated, here with the rows of all owners, in the folder "
        "where the trial ran. With each owner's rows in its own organization, owners start "
        "nodes: fedloom certs and fedloom node."
    )
    if adds_nothing(result):
        text = (
            f"Train alone, with {result.alone}: federating adds nothing, as all own weights are 1."
        )
        return PageSection("What next", text=[text])
    command = f"fedloom run {shlex.quote(recipe)}"
    return PageSection("What next", text=[text], points=[*points, more], command=command)


def _notes(result: TrialResult) -> list[PageSection]:
    """How the data was understood; [] if there is nothing to say."""
    return [PageSection("Notes on the data", points=[*result.notes])] if result.notes else []


def _calibration(card: OwnerCard) -> str:
    """The calibration error alone and federated."""
    return " → ".join(f"{error:.3f}" for error in card.calibration) if card.calibration else "–"


def _amount(gain: float, form: str, result: TrialResult) -> str:
    """A gain, in percent for errors of numbers."""
    return f"{100 * gain:{form}} %" if result.metric in RELATIVE else f"{gain:{form}}"


def _measured(result: TrialResult) -> str:
    """What a gain is."""
    joint = "joint" if result.by_columns else "federated"
    return (
        f"how much lower it is {joint} than alone"
        if result.metric in LOSSES
        else f"{joint} minus alone"
    )


def _forest_plot(result: TrialResult) -> Markup:
    """One line for each owner: the interval and the mean of its gain."""
    known = [c for c in result.owners.values() if c.low is not None and c.high is not None]
    if not known:
        return Markup('<svg role="img" aria-label="no interval" viewBox="0 0 520 20"></svg>')
    low = max(-1.0, min(0.0, *(c.low or 0.0 for c in known)))
    high = min(1.0, max(result.worth * 1.5, *(c.high or 0.0 for c in known)))
    names = [fmt.shortened(name, LONGEST) for name in titles(result)]
    pad, left, width, step = 0.04 * (high - low), max(132, 14 + 8 * max(map(len, names))), 233, 26
    low, high = low - pad, high + pad
    height = step * len(result.owners) + 40

    def x(value: float) -> float:
        return left + width * (min(max(value, low), high) - low) / (high - low)

    parts = [
        f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="6" y2="{height - 28}" '
        'style="stroke:var(--ink)"/>',
        f'<line x1="{x(result.worth):.1f}" x2="{x(result.worth):.1f}" y1="6" y2="{height - 28}" '
        'style="stroke:var(--soft);stroke-dasharray:4 3"/>',
    ]
    for tick in _ticks(low, high):
        number = _amount(tick, "+.3g", result).replace("-", "−") if abs(tick) > 1e-9 else "0"
        parts.append(
            f'<text x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle" font-size="12" '
            'fill="var(--soft)">'
            f"{number}</text>"
        )
    for place, (name, card) in enumerate(zip(names, result.owners.values(), strict=True)):
        y, color = 20 + step * place, COLORS[card.decision]
        start = (
            f'<text x="{left - 14}" y="{y + 4}" text-anchor="end" font-size="13" fill="var(--ink)">'
        )
        parts.append(f"{start}{escape(name)}</text>")
        if card.gain is not None and card.low is not None and card.high is not None:
            parts.append(
                f'<line x1="{x(card.low):.1f}" x2="{x(card.high):.1f}" y1="{y}" y2="{y}" '
                f'style="stroke:{color};'
                f'stroke-width:3"><title>{escape(sentence(card, result.metric))}</title></line>'
            )
            parts.append(f'<circle cx="{x(card.gain):.1f}" cy="{y}" r="5" style="fill:{color}"/>')
    fits = "min-width:0;max-width:30rem;margin-left:0"  # a phone shows all of it, without scrolling
    box = f"0 0 {left + width + 15} {height}"
    head = (
        f'<svg role="img" aria-label="gain and interval of each owner" viewBox="{box}" '
        f'style="{fits}">'
    )
    return Markup(head + "".join(parts) + "</svg>")


def _ticks(low: float, high: float) -> list[float]:
    """Five round numbers at most, so that they do not touch."""
    step = next(
        s
        for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
        if (high - low) / s <= 4.5 or s == 1.0
    )
    first = -(-low // step)
    return [round((first + k) * step, 6) for k in range(20) if (first + k) * step <= high]


def _reveals(result: TrialResult, card: OwnerCard) -> PageSection:
    rows = [
        cells(
            f"{message['sender']} → {message['receiver']}",
            message["kind"],
            contents(message),
            fmt.size(message["bytes"] / max(1, message["count"])),
            f"{message['count']:,}",
        )
        for message in result.revealed
    ]
    caption = (
        f"All messages of one run of {card.method}, from its ledger. No file of rows is sent; "
        "messages are computed from rows, and may hold them."
    )
    table = PageTable(caption, ("from → to", "kind", "content", "size", "messages"), rows, words=3)
    text = f"An owner sends {fmt.size(card.sent)} and receives {fmt.size(card.received)} in a run."
    return PageSection("Messages by sender and receiver", text=[text], tables=[table])


def _methods(result: TrialResult) -> PageSection:
    side = "joint" if result.by_columns else "federated"
    chosen = [cells(name, side, f"{count}") for name, count in result.chosen.items()]
    chosen += [cells(name, "alone", f"{count}") for name, count in result.chosen_alone.items()]
    table = PageTable(
        "Number of folds in which each was chosen on the other folds",
        ("candidate", "for", "folds"),
        chosen,
        words=2,
    )
    reasons = [cells(name, reason) for name, reason in result.infeasible.items()]
    reasons += [cells(name, "feasible; add it with --method") for name in result.not_tried]
    left_out = PageTable(
        "Methods that were left out", ("method", "reason"), reasons, words=2, prose=True
    )
    tried = (
        f"Candidates for {'joint' if result.by_columns else 'federating'}: "
        f"{'; '.join(result.tried)}."
    )
    recipe = "; ".join(
        f"{name} = {value}" for name, value in result.recipe.items() if name != "data"
    )
    best = f"Recipes: federated, {recipe}; alone, {result.alone}."
    if result.by_columns:
        best = f"Alone: {result.alone}."
    return PageSection(
        "Methods",
        text=[best, tried],
        tables=[table],
        details=[Details(f"{len(reasons)} methods were left out", table=left_out)],
    )
