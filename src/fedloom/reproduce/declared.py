"""How often each method sends a row through a network, before anything is run.

A method is declared by one function: from a `Scene`, the numbers of a run, to the `Passes` of all its rounds. What the
networks are, and what a pass costs, is `fedloom.reproduce.cost`'s business. Where the course of a run decides (how many
friends AFIND+ keeps), a usual number stands. `benchmarks/passes.py` holds every function to the operations counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from fedloom.methods.steps import TUNED
from fedloom.reproduce import declared_columns as columns
from fedloom.reproduce.passes import Passes, Scene, ask, calls, products, train

Declared: TypeAlias = Callable[[Scene], Passes]
FRIENDS = 1.5
"""Coreset of a peer after the first round, by the paper's threshold: it shrinks to a friend or two."""
FRIENDLY = 0.4
"""Of the neighbours, by the calibrated threshold."""


# -- distillation: τ batches of own rows, then τ public ones that everybody sees -------------------


def _drawn(s: Scene) -> Passes:
    """τ batches; of own rows or of public ones, where the answer's pass is used again for the step."""
    return train(s.cfg.tau * s.cfg.batch_size, s.cfg.tau)


def _look(s: Scene) -> Passes:
    """The answers before a stage, for less-forgetting."""
    return ask(s.cfg.tau * s.cfg.batch_size)


def _local(s: Scene) -> Passes:
    return (_drawn(s) + calls(1)) * (s.chosen * s.rounds)


def _fedal(s: Scene) -> Passes:
    """3 for the local stage and 3 for the transfer, and 1 for each reference: 8 for Local's 3."""
    c, several = s.cfg, s.cfg.tau > 1
    each = _drawn(s) + _look(s) * bool(c.lf_local and several) + calls(1)
    if c.exchanges:
        each += _drawn(s) + _look(s) * bool(c.lf_global and several) + calls(2 * c.tau)
    if c.adv:  # the discriminator learns, and then says what would mislead it
        widths = (s.classes, *c.disc_hidden, s.clients)
        each += Passes(beside=5 * 2 * sum(a * b for a, b in pairwise(widths)) * c.tau * c.batch_size)
    return each * (s.chosen * s.rounds)


def _fedproto_public(s: Scene) -> Passes:
    """The features that are sent cost a pass, and the step towards the mean another, forward and back."""
    each = _drawn(s) + calls(1)
    if s.cfg.ld:
        each += _look(s) + _drawn(s) + calls(2 * s.cfg.tau)
    return each * (s.chosen * s.rounds)


def _fccl(s: Scene) -> Passes:
    """Two memories of oneself in the private stage, one in FCCL+; FCCL trains alone before a client's first round."""
    c, first = s.cfg, getattr(s.cfg, "pretrain", 0)
    memories = int(c.looks_back) + int(getattr(c, "remembers", False))
    each = _drawn(s) + _look(s) * memories + calls(1)
    if c.exchanges:
        each += _drawn(s) + calls(2 * c.tau)
    begun = train(c.batch_size, 1) * first * min(s.present, s.chosen * s.rounds)
    return each * (s.chosen * s.rounds) + begun


def _cfd(s: Scene) -> Passes:
    """The server learns each public batch, and answers it."""
    c = s.cfg
    server: Passes = (train(c.batch_size) * c.server_steps + ask(c.batch_size)) * c.tau
    return ((_drawn(s) * 2 + calls(1 + 2 * c.tau)) * s.chosen + server) * s.rounds


def _feddf(s: Scene) -> Passes:
    """Each model answers the public rows that the server's steps drew; each architecture's average learns from that."""
    steps, size = s.cfg.server_steps, s.cfg.batch_size
    drawn = s.public * (1 - (1 - 1 / max(1, s.public)) ** (steps * size)) if steps else 0
    return _local(s) + (ask(drawn) * s.chosen + train(steps * size, steps) * s.groups) * s.rounds


# -- weights: passes over the own rows -------------------------------------------------------------


def _update(s: Scene, rows: float | None = None) -> Passes:
    """The local training of all who share weights; passes that move the head alone go back through nothing else."""
    heads = s.epochs(s.cfg.head_epochs if s.cfg.personal_head else 0, rows)
    return s.epochs(s.cfg.epochs, rows) + Passes(steps=heads.steps, asked=heads.trained)


def _fedavg(s: Scene) -> Passes:
    return (_update(s) + calls(1)) * (s.chosen * s.rounds)


def _gossip(s: Scene) -> Passes:
    return (_update(s) + calls(2 + s.links(s.cfg.neighbours))) * (s.present * s.rounds)


def _pens(s: Scene) -> Passes:
    """In the first rounds each tries the models that it gets on its rows."""
    c, near = s.cfg, s.links(s.cfg.neighbours)
    tried: Passes = ask(min(s.rows, c.loss_rows or s.rows)) * near * min(s.rounds, c.first_rounds)
    return ((_update(s) + calls(2 + near)) * s.rounds + tried) * s.present


def _federico(s: Scene) -> Passes:
    """Each tries the models that it gets, and its own, on its rows."""
    near = s.links(s.cfg.neighbours)
    return (_update(s) + ask(s.rows) * (near + 1) + calls(3 + near)) * (s.present * s.rounds)


def _probe(s: Scene) -> Passes:
    """A gradient of the last layer before the head, which goes back through little."""
    rows = min(s.rows, s.cfg.probe_rows)
    return Passes(asked=rows, steps=1)


def _asked(s: Scene) -> tuple[float, float]:
    """How many others a peer asks over all rounds, and how many more it only probes before."""
    c, opened = s.cfg, sum(s.cfg.opens(t) for t in range(s.rounds))
    usual = min(s.near, FRIENDLY * s.near if c.threshold == "calibrated" else FRIENDS)
    if c.open_by == "probe":
        return usual * s.rounds, s.links(c.open_k) * opened
    return usual * (s.rounds - opened) + s.links(c.open_k) * opened, 0.0


def _afind(s: Scene) -> Passes:
    """Faithful: whoever is asked trains from the asker's body, so a round has 1 + |C| trainings; cheap: one."""
    friends, probed = _asked(s)
    own = _update(s) + _probe(s) * 2
    if s.cfg.mode == "faithful":
        answer = _update(s) + _probe(s) * 2 + calls(2)
        return (own * s.rounds + answer * friends + (_probe(s) + calls(2)) * probed + calls(3 * s.rounds)) * s.present
    return (own * s.rounds + (_probe(s) * 2 + calls(3)) * (friends + probed) + calls(4 * s.rounds)) * s.present


def _friends(s: Scene) -> Passes:
    """How a host's peers find each other: at random, or by AFIND+'s probes."""
    if s.cfg.friends == "random":
        return calls(s.links(s.cfg.neighbours)) * (s.present * s.rounds)
    friends, probed = _asked(s)
    return ((_probe(s) + calls(3)) * (friends + probed) + _probe(s) * (3 * s.rounds)) * s.present


def _ditto(s: Scene) -> Passes:
    """The personal model is trained beside the shared one."""
    own = s.epochs(s.cfg.personal_epochs)
    return (_update(s) + own + calls(2)) * (s.present * s.rounds) + _friends(s)


def _fedfomo(s: Scene) -> Passes:
    """A part of the rows is held out, on which all models are tried, and the one that a peer began with."""
    held = max(1, int(s.cfg.validation * s.rows))
    tried = _asked(s)[0] if s.cfg.friends == "afind" else s.links(s.cfg.neighbours) * s.rounds
    own = (_update(s, max(1, s.rows - held)) + calls(3)) * s.rounds + ask(held) * (tried + 2 * s.rounds)
    return own * s.present + _friends(s)


def _dispfl(s: Scene) -> Passes:
    """One more gradient a round says which weights come back."""
    return (_update(s) + train(min(s.rows, s.cfg.batch_size)) + calls(2)) * (s.present * s.rounds) + _friends(s)


# -- meta-learning: gradients on half of the rows --------------------------------------------------


def _meta_gradient(s: Scene) -> Passes:
    """4 gradients by differences; exactly 2 and a pass back through the first one's graph, which is as dear; or 2."""
    return train(s.rows / 2) * (2.0 if s.cfg.hvp == "first_order" else 4)


def _perfedavg(s: Scene) -> Passes:
    each: Passes = _meta_gradient(s) * s.cfg.local_steps + calls(1)
    return each * (s.chosen * s.rounds)


def _augfl(s: Scene) -> Passes:
    """A meta-gradient a client, and the server's steps on its rows; contrasts compare a batch with all of them."""
    c = s.cfg
    clients = (_meta_gradient(s) + calls(1)) * (s.chosen if c.federated else 0)
    if not c.on_rows or not s.server:
        return clients * s.rounds
    size = min(c.kt_batch_size, s.server)
    batches: int = c.kt_batches or -(-s.server // size)
    contrasts = 8 * size * s.server * c.crd_width if c.crd else 0
    return (clients + (train(size) + Passes(beside=contrasts)) * batches) * s.rounds


def _fedproto(s: Scene) -> Passes:
    return (s.epochs(s.cfg.epochs) + ask(s.rows) + calls(1)) * (s.chosen * s.rounds)


def _fedcp(s: Scene) -> Passes:
    """All batches go through the network once before they train it; and the policy is a layer beside."""
    own = s.epochs(s.cfg.epochs)
    return (_conditional(s, own) + ask(own.trained, own.steps) + calls(1)) * (s.chosen * s.rounds)


def _conditional(s: Scene, work: Passes) -> Passes:
    """With FedCP's policy, of twice the features' width, and the kernel over the rows of a batch."""
    return work + products(s.width * (2 * s.width + 3 * s.cfg.batch_size)) * (3 * work.trained)


def _fedpcl(s: Scene) -> Passes:
    """The encoder is fixed: a client's rows go through it once, and what learns is one layer."""
    c, once = s.cfg, min(s.present, s.chosen * s.rounds)
    learnt = _projected(s, s.epochs(c.epochs).trained, s.epochs(c.epochs).steps) * (s.chosen * max(0, s.rounds - 1))
    return ask(s.rows) * once + learnt + calls(s.chosen * s.rounds + once)


def _projected(s: Scene, rows: float, steps: float) -> Passes:
    """Steps of FedPCL's layer, against the prototypes of every client."""
    each = s.cfg.width * (s.width + s.classes * (1 + s.clients))
    return products(each) * (3 * rows) + Passes(steps=steps)


DECLARED: dict[str, Declared] = {
    **dict.fromkeys(("local", "fd", "fedavg-adam"), _local),
    **dict.fromkeys(("fedal", "fedmd", "fedmd-lf", "feddf-al"), _fedal),
    **dict.fromkeys(("fccl", "fccl-plus"), _fccl),
    "fedproto-public": _fedproto_public,
    "cfd": _cfd,
    "feddf": _feddf,
    **dict.fromkeys(("fedavg", "fedavg-ft", "fedlp"), _fedavg),
    **dict.fromkeys(("gossip", "alone"), _gossip),
    "pens": _pens,
    "federico": _federico,
    **dict.fromkeys(("afind-plus", "afind", "fedavg-ft-afind"), _afind),
    **dict.fromkeys(("ditto", "ditto-afind"), _ditto),
    **dict.fromkeys(("fedfomo", "fedfomo-afind"), _fedfomo),
    **dict.fromkeys(("dispfl", "dispfl-afind"), _dispfl),
    **dict.fromkeys(("augfl", "kd-only", "server-ce-only", "local-only"), _augfl),
    "per-fedavg": _perfedavg,
    "fedproto": _fedproto,
    "fedcp": _fedcp,
    "fedpcl": _fedpcl,
    "split": columns.split,
    "active-only": columns.active_only,
    "pooled": columns.pooled,
    **dict.fromkeys(("proto-evfl", "proto-student"), columns.proto_evfl),
    "ss-vfl": columns.ss_vfl,
    "fedhssl": columns.fedhssl,
}
"""The passes of every registered method."""

STAGES = {
    **dict.fromkeys(("fedal", "fedmd", "fedmd-lf", "fccl", "fccl-plus", "cfd", "fedproto-public", "feddf"), 2),
    "feddf-al": 3,
}
"""Stages of a round, after each of which all are tested; 1 for the others."""


def training(method: str, scene: Scene) -> Passes:
    """What the rounds of a method come to; one of your own counts as if each client trained on its own rows alone."""
    if method in DECLARED:
        return DECLARED[method](scene)
    c = scene.cfg
    size = getattr(c, "batch_size", 32)
    steps = getattr(c, "tau", None) or -(-scene.rows // size) * c.iterations_per_round
    return (train(steps * size, steps) + calls(1)) * (scene.chosen * scene.rounds)


def testing(method: str, scene: Scene, points: int | None, columns: bool) -> Passes:
    """What looking at the test rows comes to: at the start, and after every stage of some rounds."""
    looks = 1 + min(points or 100, scene.rounds) * STAGES.get(method, 1)
    if columns:
        alone = (ask(scene.test + scene.own_test, 2) + calls(2)) * len(scene.cfg.ways)
        return (ask(scene.test) + calls(1) + alone) * (looks * scene.clients)
    each = ask(scene.test + scene.own_test, 2) + calls(2)
    for way in scene.cfg.ways:
        each += ask(scene.own_test) + calls(1) + _prepared(method, scene, way)
    return each * (looks * scene.clients)


def _prepared(method: str, s: Scene, way: str) -> Passes:
    """Fine-tuning on the own rows, or steps on half of them."""
    if way == TUNED:
        return s.epochs(s.cfg.finetune_epochs)
    steps, half = int(s.cfg.steps_of(way)), s.rows / 2
    if method == "fedpcl":
        return ask(half) + _projected(s, half * steps, steps)
    return _conditional(s, train(half) * steps) + ask(half) if method == "fedcp" else train(half) * steps
