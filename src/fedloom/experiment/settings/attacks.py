"""What curious parties could infer about labels: the attacks of `fedloom.protect.attacks` on what they receive.

Like all evaluation it is outside the protocol: it sends nothing and changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.evaluation import LeaksLabels
from fedloom.core.rng import stream
from fedloom.experiment.plan import RunPlan
from fedloom.protect import attacks


def leaks(
    plan: RunPlan, embedded: Mapping[int, Tensor], name: Callable[[int], str]
) -> Iterator[tuple[str, float, str]]:
    """The success of each attack by each passive party, then its mean over these: (measure, value, party).

    Colocated parties are left out: the active party has the labels. All attacks of a party are judged on the same
    rows, those whose labels it was not given; "attack chance" is their baseline.

    Args:
        plan: of a vertical run.
        embedded: each party's embeddings (N_a, d) of the aligned people.
        name: of a party.

    Raises:
        ConfigError: so many labels are known that none is left to infer; or the page does not declare what leaks.
    """
    active, each = plan.server, plan.run.evaluate.attacks
    assert each is not None
    if not isinstance(active, LeaksLabels):
        raise ConfigError(
            f"evaluate.attacks: the active party of {plan.method.name} does not declare what others could learn about "
            "labels: define exposed() on its page, see fedloom.core.evaluation.LeaksLabels"
        )
    labels, exposed = (
        active.data.y(torch.arange(active.context.aligned, device=active.context.device)),
        active.exposed(embedded),
    )
    found: dict[str, list[float]] = {}
    for m, own in embedded.items():
        if m in plan.colocated:
            continue
        known = attacks.known_rows(labels, each, stream(plan.run.seed, "attack", m))
        if len(known) == len(labels):
            raise ConfigError(f"evaluate.attacks: with {each} of each class all labels are known; give fewer")
        received = {kind: vectors[m] for kind, vectors in exposed.items() if m in vectors}
        guesses = _guesses(plan, own, received, known, labels[known])
        values = {what: attacks.success(g, labels, known) for what, g in guesses.items()}
        for what, value in {**values, "chance": attacks.chance(labels, known)}.items():
            found.setdefault(what, []).append(value)
            yield f"attack {what}", value, name(m)
    for what, shares in found.items():
        yield f"attack {what} mean", float(np.mean(shares)), ""


def _guesses(
    plan: RunPlan, own: Tensor, received: Mapping[str, Tensor], known: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """The classes (N_a,) that each attack guesses, from own embeddings (N_a, d), what was received, and k labels."""
    found = {}
    gradients = received.get("gradients", received.get("logit gradients"))
    if "logit gradients" in received:
        found["gradients direct"] = attacks.direct(received["logit gradients"])
    if gradients is not None:
        found["gradients nearest"] = attacks.nearest(gradients, known, labels)
    if "prototypes" in received:
        found["prototypes"] = attacks.to_prototypes(own, received["prototypes"])
    found["embeddings nearest"] = attacks.nearest(own, known, labels)
    found["completion"] = attacks.completion(own, known, labels, len(plan.data.classes))
    return found
