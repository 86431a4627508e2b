"""What the messages of a run may tell, by proof (differential privacy), and what they told measured
attacks.
"""

from fedloom.experiment.run.result import PrivacySpent
from fedloom.report import formatting as fmt
from fedloom.report.page import Details, PageSection, PageTable, cells
from fedloom.report.read import Run


def privacy(run: Run) -> PageSection | None:
    """The messages with a guarantee, the adjacency of data sets, and ε of each client; None without
    any.
    """
    found = run.summary.privacy
    if not found:
        return None
    rows = [
        cells(
            fmt.capital(one.message),
            one.adjacency,
            _range(one),
            f"{one.delta:g}",
            fmt.whole(len(one.epsilon.per_client)),
        )
        for one in found
    ]
    columns = (
        "Message",
        "Adjacent data sets: between two of them",
        "ε of a client",
        "δ",
        "Clients",
    )
    table = PageTable("Messages with a guarantee", columns, rows, words=2)
    points = [
        "The guarantee does not cover other messages, such as scores of their own rows.",
        "What a malicious coordinator can learn besides is in docs/threat-model.md.",
    ]
    if any(one.simulated for one in found):
        points.append(
            "Simulated: the noise was drawn from the run's seed, so anybody can repeat it. The "
            "accuracy is that of a private run; the guarantee holds only where parties have a "
            "secret of their own, as nodes do."
        )
    return PageSection(
        "Differential privacy",
        points=points,
        tables=[table],
        details=[_by_client(run, one) for one in found],
    )


def _range(one: PrivacySpent) -> str:
    low, high = min(one.epsilon.per_client), max(one.epsilon.per_client)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}"


def _by_client(run: Run, one: PrivacySpent) -> Details:
    """ε of each client, largest first."""
    clients = range(run.summary.clients) if one.epsilon.clients is None else one.epsilon.clients
    order = sorted(zip(clients, one.epsilon.per_client, strict=True), key=lambda pair: -pair[1])
    rows = [cells(run.display_names[i], f"{value:.3f}") for i, value in order]
    return Details(
        f"ε by client: {one.message}", table=PageTable("ε by client", ("Client", "ε"), rows)
    )


ATTACKS = {
    "labels": "most frequent class of a client, guessed right",
    "class shares": "class shares of a client, overlap with the guess",
    "membership": "whether a row was trained on, AUC",
    "row labels": "labels of rows, guessed right",
    "reconstruction": "rows, explained variance",
}
"""What is attacked, and the unit."""


def leaks(run: Run) -> PageSection | None:
    """What each message told attacks, against chance; None if that was not measured."""
    found = run.summary.leaks
    if not found:
        return None
    rows = [
        cells(
            fmt.capital(one.message),
            ATTACKS.get(one.attack, one.attack),
            fmt.percent(one.success),
            fmt.percent(one.chance),
            "–" if one.gain is None else f"{fmt.points(one.gain[0])} to {fmt.points(one.gain[1])}",
            "yes" if one.gain is not None and one.gain[0] > 0 else "not seen",
        )
        for one in found
    ]
    columns = (
        "Message",
        "Attack",
        "Success",
        "Chance",
        "Difference, 95 % interval over parties",
        "More than chance",
    )
    text = (
        "Attacks that read the messages of this run, and know labeled rows of the same "
        "distribution. Stronger attacks exist: a success near chance proves nothing."
    )
    return PageSection(
        "What messages told",
        text=[text],
        tables=[PageTable("Measured leaks", columns, rows, words=2)],
    )
