"""The differential privacy of a run: of its method, from its clients' notes, and of its
`[aggregate.noise]`.
"""

from collections.abc import Sequence

import numpy as np

from fedloom.core.method import Guarantee
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.record import Record
from fedloom.experiment.run.result import PrivacySpent, Spread
from fedloom.protect.accountant import CLIENT, Releases, epsilon
from fedloom.protect.noise import SIMULATED

CONTRIBUTIONS = "private updates"
"""The metric of the number of means with noise that a client was part of in a round."""


def guarantees(plan: RunPlan) -> tuple[Guarantee, ...]:
    """The guarantees of the method's messages, and of means with noise."""
    own: tuple[Guarantee, ...] = plan.cfg.guarantees
    noise = plan.run.aggregate.noise
    if noise is None:
        return own

    def spent(means: Sequence[float]) -> float:
        return epsilon([Releases(noise.sigma, round(sum(means)))], noise.delta)

    return (*own, Guarantee("mean", CLIENT, noise.delta, CONTRIBUTIONS, spent, by_server=True))


def privacy_notes(plan: RunPlan) -> set[str]:
    """The notes that are recorded of each client."""
    notes = {guarantee.note for guarantee in plan.cfg.guarantees}
    return {*notes, SIMULATED} if notes else set()


def privacy_spent(plan: RunPlan, record: Record, names: Sequence[str]) -> list[PrivacySpent]:
    """ε of each client in the run so far, for each kind of message that has a guarantee and was
    sent.

    Args:
        plan: of the run.
        record: its notes.
        names: of the clients.
    """
    notes: dict[tuple[str, str], list[float]] = {}
    for _, _, _, party, metric, value in record.metrics:
        notes.setdefault((metric, party), []).append(value)
    by_seed = any(name == SIMULATED and max(values) > 0 for (name, _), values in notes.items())
    found = []
    for guarantee in guarantees(plan):
        sent = {
            i: tuple(notes[guarantee.note, name])
            for i, name in enumerate(names)
            if (guarantee.note, name) in notes
        }
        if not sent:
            continue
        known = {values: guarantee.epsilon(values) for values in {*sent.values()}}
        each = [known[values] for values in sent.values()]
        some = {} if len(sent) == len(names) else {"clients": [*sent]}
        spread = Spread(mean=float(np.mean(each)), std=float(np.std(each)), per_client=each, **some)
        simulated = plan.server_context.secret is None if guarantee.by_server else by_seed
        found.append(
            PrivacySpent(
                message=guarantee.message,
                adjacency=guarantee.adjacency,
                delta=guarantee.delta,
                epsilon=spread,
                simulated=simulated,
            )
        )
    return found
