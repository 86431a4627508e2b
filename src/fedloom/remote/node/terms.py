"""What a run will send from a node, in plain words, from the installed method and the node's
config.

Nothing here is the coordinator's text: names of columns are those that the node's owner allows. The
terms are the same at all nodes of a run, and their hash is part of every secure sum, so nodes that
were shown others have no sum together. They do not hold the whole config
(docs/security-advisories.md, N2). What is known of a method stands on its page: a fact that a page
does not declare counts as the worst.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError
from fedloom.core.method import Method, MethodConfig
from fedloom.core.party import Party, answers_nothing, telling
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.demand import evaluations
from fedloom.experiment.plan.networks import sizes
from fedloom.protect.accountant import Releases, epsilon
from fedloom.remote.node.config import NodeConfig, NodeData

WEAKNESSES: Final = {
    "W1": "the coordinator sees each message of this node; a message may reveal rows",
    "W2": "a coordinator that does not follow the protocol can read rows from secure sums, and "
    "this node's own messages",
    "W3": "other nodes get this node's messages, or a gradient at a point that they choose; both "
    "may reveal rows",
    "W4": "messages for each aligned row reveal that row's columns to the coordinator",
    "W5": "the coordinator learns of each of its ids whether it is here",
    "W6": "the time that a call takes is not covered by ε",
    "W7": "classes or cells of few rows are seen in what is sent, also in a sum",
    "W8": "each owner has a column or an effect, so sums tell those of this node alone",
}
"""By number, as in docs/results/leaks.md."""
_MODELS_SENT: Final = {"one network", "architecture groups", "pretrained encoder"}
"""The needs of a method that sends weights."""


def terms(run: RunConfig, method: Method, cfg: Any, rounds: int) -> str:
    """The terms of a run, in lines: equal for coordinator and all nodes, whatever the seed.

    Args:
        run: the config that nodes receive.
        method, cfg, rounds: of it.
    """
    return "\n".join(_lines(run, method, cfg, rounds))


def sha256(text: str) -> str:
    """The hash of a text, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def own_epsilon(party: Party[MethodConfig], rounds: int) -> list[str]:
    """A line for each guarantee that this node's noise gives: the most that a run of so many rounds
    spends. In secure sums noise may be of shares, of which a node knows its own alone.
    """
    if_so = ""
    if party.context.aggregator.secure:
        if_so = (
            f", if {party.context.parties} parties take part, as the coordinator says, and add "
            "their noise. The budget here counts what this node adds, and may be charged more"
        )
    return [
        f"This run's own ε: at most {_up(one.epsilon(one.planned(party, rounds)))} at δ = "
        f"{one.delta:g} for {one.message}, with {len(party.data):,} training rows{if_so}. All "
        "else, such as numbers of rows, has no noise."
        for one in party.cfg.guarantees
        if not one.by_server and one.planned is not None
    ]


def own_budget(releases: Sequence[Releases], data: NodeData) -> list[str]:
    """What a run takes of the budget of this node's rows, and whether it can begin here at all."""
    if not releases:
        return []
    found = epsilon([*releases], data.delta)
    lines = [
        f"Of this node's budget the run takes at most ε = {_up(found)} at δ = {data.delta:g}, of "
        f"{data.epsilon:g} in all runs."
    ]
    if not found <= data.epsilon:
        lines.append(
            "This run cannot begin here: it needs more noise, fewer rounds, or a higher epsilon in "
            "node.toml."
        )
    return lines


def _up(found: float) -> str:
    return f"{math.ceil(found * 1000) / 1000:g}"


def summary(
    config: NodeConfig,
    caller: str,
    run: RunConfig,
    method: Method,
    cfg: Any,
    rounds: int,
    own: Sequence[str] = (),
) -> str:
    """What a node's owner approves: the terms, and what this node does with them, with the lines
    `own`.
    """
    data = config.data[run.data.name]
    common = terms(run, method, cfg, rounds)
    looks = _looks(config, data, run, method, cfg, rounds)
    most = (
        f"at most ε = {data.epsilon:g} at δ = {data.delta:g} in all runs"
        if cfg.promises
        else "no ε"
    )
    notes = (
        "no"
        if not config.notes or run.aggregate.secure
        else "counts alone"
        if cfg.promises
        else "yes"
    )
    lines = [
        common,
        f"For {caller}, with the rows of {config.cohort(data)} ({data.rows}).",
        f"What is sent: {config.outgoing}; {most}.",
        *own,
        f"Scores of models: {looks}. Notes: {notes}.",
    ]
    if run.columns.private:  # unless node.toml names it, the coordinator does
        lines.append(f"Ids are in the column {data.id or run.columns.id!a}.")
    if run.aggregate.secure:
        lines.append(
            f"Sums are of at least {config.min_sum} of "
            f"{', '.join(sorted({config.name, *config.peers}))}."
        )
    if method.client.TO_PEERS:
        lines.append(f"Peers are among {', '.join(sorted(config.peers)) or 'none'}.")
    return "\n".join([*lines, f"Terms: {sha256(common)[:16]} (the same at all nodes)"])


def _looks(
    config: NodeConfig, data: NodeData, run: RunConfig, method: Method, cfg: Any, rounds: int
) -> str:
    """What the coordinator learns of the scores of models on this node's test rows."""
    if method.setting == "vertical":
        return "by the coordinator, from what this node sends of its test rows, without noise"
    if not (data.score and config.evaluate):
        return "no; without those of another site the run ends before its first round"
    count = evaluations(run, cfg, rounds) * (1 + len(cfg.eval_modes))
    how = "with noise" if config.secret_noise else "exact (secret_noise = false)"
    return f"yes, {how}, at most {data.looks} in all runs; this run takes {count}"


def weaknesses(run: RunConfig, method: Method, cfg: Any) -> list[str]:
    """The numbers of the known weaknesses that a run has."""
    secure, client = run.aggregate.secure, method.client
    single = [
        name for name in _replies(method, client.CALLS) if not (secure and name in client.MEANS)
    ]
    silent = client.TELLS is None
    found = {
        "W1": bool(single) and not cfg.promises,
        "W2": secure and not cfg.promises,
        "W3": bool(client.TO_PEERS) or telling(client, "passed on") != (),
        "W4": method.setting == "vertical",
        "W5": run.columns.private,
        "W6": cfg.promises,
        "W7": silent or (telling(client, "by class") != () and not cfg.promises),
        "W8": secure and (silent or not cfg.rows_add_up),
    }
    return [number for number, there in found.items() if there]


def _lines(run: RunConfig, method: Method, cfg: Any, rounds: int) -> Iterator[str]:
    yield f"Method {method.name}: {method.title}. {rounds} rounds, {run.data.clients} parties."
    form = run.data.row_schema
    if form is not None:
        names = ", ".join(ascii(column.name)[1:-1] for column in form.columns) or "images"
        what = f"{len(form.classes)} classes" if form.classes else "a number"
        yield f"Inputs: {names}. Label: {ascii(form.label)[1:-1]}, {what}."
    elif run.columns.private:
        yield (
            "Inputs: this node's columns. Rows are matched by their ids; the coordinator learns "
            "which it has, too."
        )
    if (networks := sizes(run, method)) and {*method.needs} & _MODELS_SENT:
        sized = [
            f"as many numbers as {ascii(name)[1:-1]}, which is not fedloom's own"
            if n is None
            else f"{n:,} numbers ({ascii(name)[1:-1]})"
            for name, n in networks.items()
        ]
        yield f"A model that is sent has at most {', or '.join(sized)}."
    client, secure = method.client, run.aggregate.secure
    replies = {
        "the coordinator": _replies(method, client.CALLS),
        "peers": _replies(method, client.TO_PEERS),
    }
    for receiver, sent in replies.items():
        each = " for each peer" if receiver == "peers" else ""
        on = (
            ", which passes it on to the other nodes,"
            if receiver != "peers" and telling(client, "passed on")
            else ""
        )
        yield f"Sent to {receiver}{on} in a round: {'' if sent else 'nothing.'}".rstrip()
        for name in sent:
            how = " Only as part of a secure sum." if secure and name in client.MEANS else ""
            yield (
                f"  {name}, {_times(cfg, run, name, rounds)}{each}: "
                f"{_first_line(method, name)}{how}"
            )
    for one in cfg.guarantees:
        by = "the coordinator's noise" if one.by_server else "this node's noise"
        if secure and not one.by_server:
            by = "this node's noise or its share of noise"
        yield (
            f"Privacy: {one.message} by {by}, δ = {one.delta:g}, between data sets of which "
            f"{one.adjacency}."
        )
    if not cfg.guarantees:
        yield "Privacy: no ε. What is sent is computed from rows, and may reveal rows."
    for number in weaknesses(run, method, cfg):
        yield f"Weakness {number}: {WEAKNESSES[number]}."
    yield "A page that is not fedloom's own may have more weaknesses than are listed."
    usual = _usual(method)
    other = {
        name: value
        for name, value in cfg.model_dump(mode="json").items()
        if (name, value) not in usual
    }
    yield (
        "Settings: those of the "
        f"method{', but ' + json.dumps(other, sort_keys=True) if other else ''}."
    )
    yield (
        "Not in this text, and the coordinator's choice, also after an approval: the run's seed, "
        "scale, split, optimizer, class weights, rule of means, and what is done with missing "
        "values."
    )


def _usual(method: Method) -> list[tuple[str, Any]]:
    """The settings of a method where a run has no others; none where it must have some."""
    try:
        return [*method.configure().model_dump(mode="json").items()]
    except ConfigError:
        return []


def _replies(method: Method, names: tuple[str, ...]) -> list[str]:
    """The party's methods whose replies have content."""
    return [name for name in names if not answers_nothing(method.client, name)]


def _first_line(method: Method, name: str) -> str:
    return (
        (inspect.getdoc(getattr(method.client, name)) or "its page does not say what.")
        .partition("\n\n")[0]
        .replace("\n", " ")
    )


def _times(cfg: Any, run: RunConfig, name: str, rounds: int) -> str:
    """How often a method is called, in a round (see `MethodConfig.calls_in_round`) and in all."""
    about = SimpleNamespace(parties=run.data.clients, aligned=run.columns.aligned or 0)
    count = cfg.calls_in_round(cast(ClientContext, about)).get(name, 1)
    if not count:
        return "once for each batch of aligned rows"
    return f"{'once' if count == 1 else f'up to {count} times'}, at most {count * rounds:,} in all"
