"""Measures how well curious parties can infer labels: the attacks of `fedloom.protect.attacks` on
received messages.

As evaluation, it sends no counted message and changes no state.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.evaluation import LeaksLabels
from fedloom.core.rng import stream
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.metrics import ATTACK, Metric
from fedloom.protect import attacks


def label_attacks(
    plan: RunPlan, embedded: Mapping[int, Tensor], name: Callable[[int], str]
) -> Iterator[tuple[str, float, str]]:
    """The success of each attack by each passive party, then its mean over parties: (metric, value,
    party).

    Args:
        plan: of a vertical run.
        embedded: embeddings (N_a, d) of aligned rows, by party.
        name: from a party's number to its name.

    Raises:
        ConfigError: all labels are known, or the page does not define `exposed`.
    """
    active, each = plan.server, plan.run.evaluate.attack_labels
    assert each is not None
    if not isinstance(active, LeaksLabels):
        raise ConfigError(
            f"evaluate.attack_labels: the active party of {plan.method.name} does not declare "
            "what others receive: define exposed() on its page, see "
            "fedloom.core.evaluation.LeaksLabels"
        )
    shares: dict[str, list[float]] = {}
    for m, values in successes(plan, embedded, each).items():
        for attack, value in values.items():
            shares.setdefault(attack, []).append(value)
            yield str(Metric(ATTACK, attack)), value, name(m)
    for attack, each_share in shares.items():
        yield Metric(ATTACK, attack).mean, float(np.mean(each_share)), ""


def successes(
    plan: RunPlan, embedded: Mapping[int, Tensor], each: int
) -> dict[int, dict[str, float]]:
    """The share of labels that each attack guesses right, by passive party, with `each` known
    labels of each class.

    Colocated parties are left out, as the active party has the labels. All attacks of a party are
    evaluated on the same rows, those whose labels it does not know; "chance" is the baseline.

    Raises:
        ConfigError: all labels are known.
    """
    active = plan.server
    assert active is not None
    labels = active.data.y(torch.arange(active.context.aligned, device=active.context.device))
    exposed = active.exposed(embedded) if isinstance(active, LeaksLabels) else {}
    found = {}
    for m, own in embedded.items():
        if m in plan.colocated:
            continue
        known = attacks.known_rows(labels, each, stream(plan.run.seed, "attack", m))
        if len(known) == len(labels):
            raise ConfigError(
                f"evaluate.attack_labels: with {each} of each class all labels are known: set fewer"
            )
        received = {kind: vectors[m] for kind, vectors in exposed.items() if m in vectors}
        guesses = _guesses(plan, own, received, known, labels[known])
        values = {attack: attacks.success(g, labels, known) for attack, g in guesses.items()}
        found[m] = {**values, "chance": attacks.chance(labels, known)}
    return found


def _guesses(
    plan: RunPlan, own: Tensor, received: Mapping[str, Tensor], known: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """The classes (N_a,) that each attack guesses, from own embeddings (N_a, d), received vectors
    and k labels.
    """
    guesses = {}
    gradients = received.get("gradients", received.get("logit gradients"))
    if "logit gradients" in received:
        guesses["gradients direct"] = attacks.direct(received["logit gradients"])
    if gradients is not None:
        guesses["gradients nearest"] = attacks.nearest(gradients, known, labels)
    if "prototypes" in received:
        guesses["prototypes"] = attacks.nearest_prototype(own, received["prototypes"])
    guesses["embeddings nearest"] = attacks.nearest(own, known, labels)
    guesses["completion"] = attacks.completion(own, known, labels, len(plan.data.classes))
    return guesses
