"""Measures what the messages of a run tell: the attacks of `fedloom.protect.leaks` on all that
clients sent.

As evaluation, it sends nothing and changes no state. The attacker has half of the global test rows,
with labels; nobody trained on the other half.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.context import Rows
from fedloom.core.engine import Engine
from fedloom.core.errors import MessageError
from fedloom.core.rng import stream
from fedloom.engines.local import ObservedEngine
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.protect import attacks, leaks
from fedloom.protect.leaks import Leak, Predict

MOST_ROWS = 200
"""Members of a client, and other rows, on which membership is measured."""
CONTROLS = {
    "completion": "no message (completion)",
    "embeddings nearest": "no message (own embeddings)",
}
"""Attacks on labels that read no message."""
_log = logging.getLogger("fedloom")

Sent = Sequence[tuple[Mapping[str, Any], Any]]
"""The newest replies of a client to a kind of call, each with the call's arguments."""


@dataclass(frozen=True)
class _Evidence:
    """What an attacker makes of a client's messages of a kind.

    Attributes:
        predict: the client's model, or an imitation.
        mean: mean prediction (K,) on rows that are the same for all clients.
        counts: number of rows of each class (K,), or whether it has any.
    """

    predict: Predict | None = None
    mean: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class _Attacker:
    """The attacker's rows x (n, ...), y (n,), and rows on which nobody trained."""

    plan: RunPlan
    x: Tensor
    y: Tensor
    others: tuple[Tensor, Tensor]

    @property
    def classes(self) -> int:
        return len(self.plan.data.classes)

    def held_out(self, i: int) -> tuple[Tensor, Tensor]:
        """Rows on which nobody trained, to compare with those of client i: its own ones where
        owners differ.
        """
        own = self.plan.contexts[i].tests.get("own")
        if self.plan.run.data.partition == "natural" and own is not None and len(own):
            return _some(own, self.plan.run.seed, i)
        return self.others[0][:MOST_ROWS], self.others[1][:MOST_ROWS]

    def evidence(self, i: int, sent: Sent) -> _Evidence | None:
        """What messages of client i give; None if no attack reads their form."""
        newest = sent[-1][1]
        if (weights := _weights(newest)) is not None and (
            model := self._model(i, weights, newest)
        ) is not None:
            return _Evidence(model, model(self.x).exp().mean(0))
        if (counts := self._class_counts(newest)) is not None:
            return counts
        return self._answers(i, sent)

    def _model(
        self, i: int, weights: Mapping[str, Tensor], reply: Mapping[str, Any]
    ) -> Predict | None:
        """The network that was sent; without its head, with one that the attacker learns from its
        own rows.
        """
        if self.plan.contexts[i].network is None:
            return None
        network = self.plan.contexts[i].build()
        shapes = {k: p.shape for k, p in network.named_parameters()}
        found = {k: v for k, v in weights.items() if shapes.get(k) == v.shape}
        if len(found) < len([k for k in shapes if not k.startswith("head.")]) or not found:
            return None
        statistics = {k: v for k, v in reply.get("statistics", {}).items() if isinstance(v, Tensor)}
        network.load_state_dict({**network.state_dict(), **found, **statistics})
        network.requires_grad_(False).eval()
        if not statistics:
            _standardize(network, self.x)
        if all(k in found for k in shapes):
            return lambda x: network(x).log_softmax(-1)
        features = _features_of(network)
        head = attacks.logistic(
            _padded(features(self.x)), self.y, torch.ones(len(self.y)).double(), self.classes
        )
        return lambda x: (_padded(features(x)) @ head).log_softmax(-1)

    def _class_counts(self, reply: Any) -> _Evidence | None:
        """How many rows of each class a client has, or whether it has any, as it says beside a
        vector for each.
        """
        found = (
            [v for v in reply.values() if isinstance(v, Tensor)]
            if isinstance(reply, Mapping)
            else []
        )
        counts = [v for v in found if v.shape == (self.classes,) and not v.is_floating_point()]
        return _Evidence(counts=counts[0].double()) if counts else None

    def _answers(self, i: int, sent: Sent) -> _Evidence | None:
        """Logits of public rows, of the newest call for each row."""
        public, cfg = self.plan.contexts[i].public, self.plan.cfg
        if public is None:
            return None
        numbers, answers = [], []
        for arguments, reply in sent:
            logits = _logits(reply, cfg, self.classes)
            if logits is not None and len(logits) == len(public.rows):
                numbers.append(torch.arange(len(logits)))
            elif logits is not None and {"t", "i"} <= arguments.keys() and hasattr(cfg, "tau"):
                numbers.append(
                    public.plan(int(arguments["t"]), cfg.tau, cfg.batch_size)[int(arguments["i"])]
                )
            else:
                return None
            answers.append(logits.log_softmax(-1))
        newest = dict(zip(torch.cat(numbers).tolist(), torch.cat(answers), strict=True))
        which = torch.tensor(sorted(newest))
        said = torch.stack([newest[k] for k in which.tolist()])
        return _Evidence(leaks.imitation(public.rows.x(which), said), said.exp().mean(0))


def of_clients(plan: RunPlan, engine: Engine) -> list[Leak]:
    """The success of all attacks on the messages of a horizontal run, for each kind of message."""
    if not isinstance(engine, ObservedEngine) or not engine.sent:
        _log.warning("no message was seen in this start of the run: nothing is known about leaks")
        return []
    test = plan.contexts[0].tests["test"]
    order = torch.from_numpy(stream(plan.run.seed, "leaks").permutation(len(test)))
    mine, others = order[: len(test) // 2], order[len(test) // 2 :]
    attacker = _Attacker(plan, test.x(mine), test.y(mine), (test.x(others), test.y(others)))
    found: list[Leak] = []
    with torch.no_grad():
        for kind, by_client in sorted(engine.sent.items()):
            evidence = {i: attacker.evidence(i, sent) for i, sent in sorted(by_client.items())}
            known = {i: one for i, one in evidence.items() if one is not None}
            if known:
                found += _of_kind(attacker, kind, known)
    return found


def _of_kind(attacker: _Attacker, kind: str, evidence: Mapping[int, _Evidence]) -> Iterator[Leak]:
    """All attacks that these messages allow."""
    plan, ids = attacker.plan, [*evidence]
    own = {i: plan.contexts[i].rows for i in ids}
    counts = torch.stack([_counts(own[i], attacker.classes) for i in ids])
    overall, true = counts.sum(0) / counts.sum(), counts / counts.sum(-1, keepdim=True)
    guessed = _guessed([*evidence.values()], overall)
    if guessed is not None and len(ids) > 1:
        yield leaks.labels(kind, guessed, true)
        yield leaks.class_shares(kind, guessed, true, overall)
    predict = [one.predict for one in evidence.values() if one.predict is not None]
    if len(predict) == len(ids):
        members = [_some(own[i], plan.run.seed, i) for i in ids]
        yield leaks.membership(kind, predict, members, [attacker.held_out(i) for i in ids])


def _guessed(evidence: Sequence[_Evidence], overall: Tensor) -> Tensor | None:
    """The class shares (N, K) that an attacker guesses."""
    if all(one.counts is not None for one in evidence):
        counts = torch.stack([one.counts for one in evidence if one.counts is not None])
        # a mask of classes, or numbers of rows
        shares = counts * (overall if counts.max() <= 1 else 1)
        return shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)
    means = [one.mean.double() for one in evidence if one.mean is not None]
    return (
        leaks.guessed_shares(torch.stack(means), overall) if len(means) == len(evidence) else None
    )


def of_columns(
    plan: RunPlan, embedded: Mapping[int, Tensor], guesses: Mapping[int, Mapping[str, float]]
) -> list[Leak]:
    """The success of attacks in a vertical run, on the messages of one moment.

    The passive parties guess labels, of which they know one of each class; the active party
    reconstructs the columns of half of the aligned rows from embeddings or bins, and knows those of
    the other half.

    Args:
        embedded: embeddings (N_a, d) of aligned rows, by party.
        guesses: the shares of labels that each attack guesses right, by party; "chance" among them.
    """
    names = sorted({name for values in guesses.values() for name in values} - {"chance"})
    found = []
    for name in names:
        having = [values for values in guesses.values() if name in values]
        each, chance = [values[name] for values in having], [values["chance"] for values in having]
        found.append(leaks.leak(CONTROLS.get(name, name), "row labels", each, chance))
    each, of_bins = [], "no network" in plan.method.needs
    for m, part in embedded.items():
        if m in plan.colocated:
            continue
        rows = plan.contexts[m].rows.x(torch.arange(len(part))).flatten(1)
        order = torch.from_numpy(stream(plan.run.seed, "leaks", m).permutation(len(part)))
        if of_bins:  # a row that the party lacks has none
            order = order[(part[order] > 0).any(1)]
        known, hidden = order[: len(order) // 2], order[len(order) // 2 :]
        attack = leaks.explained_by_bins if of_bins else leaks.explained
        each.append(attack(part[hidden], rows[hidden], (part[known], rows[known])))
    sent = "bins" if of_bins else "embeddings"
    return [*found, leaks.leak(sent, "reconstruction", each, 0.0)] if each else found


# -- forms of messages -----------------------------------------------------------------------------


def _weights(reply: Any) -> dict[str, Tensor] | None:
    """Weights by name, in the first part of a message that is a dict of tensors; those of FedCP's
    parts without their prefix.
    """
    for part in reply.values() if isinstance(reply, Mapping) else ():
        if isinstance(part, Mapping) and part and all(isinstance(v, Tensor) for v in part.values()):
            return {k.removeprefix("network."): v for k, v in part.items()}
    return None


def _logits(reply: Any, cfg: Any, classes: int) -> Tensor | None:
    """Logits (B, K) in a message."""
    if isinstance(reply, Mapping):
        reply = reply.get("logits", reply.get("public", reply))
    if not isinstance(reply, Tensor) and hasattr(cfg, "decode"):
        try:
            reply = cfg.decode(reply, classes)
        except (MessageError, KeyError, TypeError, ValueError):
            return None
    fits = (
        isinstance(reply, Tensor)
        and reply.ndim == 2
        and reply.shape[1] == classes
        and reply.is_floating_point()
    )
    return reply if fits else None


def _features_of(network: nn.Module) -> Predict:
    """The inputs of the network's module `head`."""
    seen: list[Tensor] = []
    head = network.get_submodule("head")
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))

    def features(x: Tensor) -> Tensor:
        seen.clear()
        network(x)
        return seen[-1].flatten(1)

    return features


def _padded(features: Tensor) -> Tensor:
    """Features (n, d) with a constant, in float64."""
    return torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)


def _standardize(network: nn.Module, x: Tensor) -> None:
    """Set the statistics of BatchNorm, which clients keep, by the attacker's rows."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        network(x)
    network.eval()


# -- rows ------------------------------------------------------------------------------------------


def _counts(rows: Rows, classes: int) -> Tensor:
    return torch.bincount(rows.y(torch.arange(len(rows))), minlength=classes).double()


def _some(rows: Rows, seed: int, i: int) -> tuple[Tensor, Tensor]:
    """At most `MOST_ROWS` rows."""
    which = torch.from_numpy(stream(seed, "leaks", i).permutation(len(rows))[:MOST_ROWS])
    return rows.x(which), rows.y(which)
