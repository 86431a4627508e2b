"""The passes of methods whose parties hold columns: all at once, and the home's classifier, which is small."""

from __future__ import annotations

from itertools import pairwise

from fedloom.methods.vertical.steps import HIDDEN
from fedloom.reproduce.passes import Passes, Scene, ask, calls, epochs, products, train

DEAR = 1.6
"""Plain steps that a step without labels lasts, by what stands above the extractor: transport, or two heads."""


def _shared(s: Scene, parties: int, rounds: int, nets: int = 1, aligned: int | None = None) -> Passes:
    """Split learning: passes over the aligned rows, each batch through all extractors and the home's classifier."""
    rows = s.aligned if aligned is None else aligned
    number = s.cfg.epochs * rounds
    each = epochs(rows, s.cfg.batch_size, number)
    home = _home(s, parties, each.trained, each.steps)
    return each * (parties * nets) + home + calls(2 * parties * each.steps)


def _home(s: Scene, parties: int, rows: float, steps: float) -> Passes:
    """The classifier on all parties' features, of two hidden layers."""
    widths = (parties * s.cfg.width, HIDDEN, HIDDEN, s.classes)
    return products(sum(a * b for a, b in pairwise(widths))) * (3 * rows) + Passes(steps=steps)


def split(s: Scene) -> Passes:
    """All parties learn from the aligned rows."""
    return _shared(s, s.clients, s.rounds)


def active_only(s: Scene) -> Passes:
    """One party does."""
    return _shared(s, 1, s.rounds)


def pooled(s: Scene) -> Passes:
    """All rows count as aligned."""
    return _shared(s, s.clients, s.rounds, aligned=s.aligned + s.clients * (s.rows - s.aligned))


def proto_evfl(s: Scene) -> Passes:
    """A party's steps on its own rows; samples for its prior and against collapse; the aligned rows for the home."""
    c, party = s.cfg, train(s.cfg.steps * s.cfg.batch_size, DEAR * s.cfg.steps)
    sample = min(c.prior_rows, s.rows)
    party += ask(s.aligned + sample * (bool(c.steps) + (c.prior != "uniform"))) + calls(1)
    party += ask(s.rows) * hasattr(c, "sure")  # Proto-Student names all its rows first
    seen = epochs(s.aligned, c.batch_size, c.epochs)
    home = _home(s, s.clients, seen.trained, seen.steps)
    if c.adaptor != "none":
        home += products(s.clients * c.width**2 * (1 + (c.adaptor == "residual"))) * (3 * seen.trained + s.aligned)
    return (party * s.clients + home) * s.rounds + ask(s.aligned + c.centred * s.rows) * s.clients


def ss_vfl(s: Scene) -> Passes:
    """Two views of a batch in the rounds that prepare, then split learning."""
    c = s.cfg
    before = min(int(c.pretrain), s.rounds)
    taught = train(2 * c.steps * c.batch_size, 2 * DEAR * c.steps) + calls(1)
    taught += products(sum(_heads(s))) * (3 * taught.trained)
    return taught * (s.clients * before) + _shared(s, s.clients, s.rounds - before)


def fedhssl(s: Scene) -> Passes:
    """A party has two extractors. Across parties only the first learns, but both see each batch, as in the others."""
    c = s.cfg
    before = min(int(c.pretrain), s.rounds)
    own = epochs(s.aligned, c.batch_size, c.epochs)
    across = Passes(
        asked=3 * own.trained, trained=own.trained, steps=2 * DEAR * own.steps, asks=own.steps, calls=2 * own.steps
    )
    within = Passes(
        asked=2 * c.steps * c.batch_size, trained=2 * c.steps * c.batch_size, steps=4 * DEAR * c.steps, calls=3
    )
    projector, predictor = _heads(s)
    across += products(4 * projector + 3 * predictor) * across.trained
    within += products(4 * projector + 3 * predictor) * within.trained
    return (across + within) * (s.clients * before) + _shared(s, s.clients, s.rounds - before, nets=2)


def _heads(s: Scene) -> tuple[float, float]:
    """Products of a row in the projector and the predictor that teach an extractor without labels."""
    width = s.cfg.projection
    return width * (s.cfg.learnt + width), width * width / 2
