"""A short audit of each ε: attacks stay below the claim, and exceed it where a mend is reverted or
noise is halved.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import audit_epsilon
from benchmarks.audit_epsilon import DELTA, Audit, highest, lower_bound, one_run_bound
from scipy import stats

from fedloom.protect.accountant import Releases, epsilon

AUDITS: dict[str, Any] = {
    **{
        f"white box, {name}": lambda name=name: audit_epsilon.audit_white_box(
            name, 1000, steps=1, short=True
        )
        for name in audit_epsilon.WHITE_BOX
    },
    "look": lambda: audit_epsilon.audit_look(2_000),
    "one run": lambda: audit_epsilon.audit_one_run(16_000),
    "choice of neighbours": lambda: audit_epsilon.audit_choice(40),
    "sums of leaves": lambda: audit_epsilon.audit_leaves(24),
    "sums of leaves of a number": lambda: audit_epsilon.audit_leaves(24, number=True),
    "node": lambda: audit_epsilon.audit_node(24, short=True),
}


@pytest.mark.parametrize("name", AUDITS)
def test_attacks_find_less_than_the_claim_and_more_where_it_is_broken(name: str) -> None:
    found: Audit = AUDITS[name]()
    assert found.found < found.claim, found
    assert found.broken and all(broken > found.claim for broken in found.broken.values()), found


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    assert highest(0, 100) == pytest.approx(1 - 0.025 ** (1 / 100))
    assert highest(7, 7) == 1.0 and stats.binom.cdf(5, 40, highest(5, 40)) == pytest.approx(0.025)
    assert (
        lower_bound(0, 0, 100) == pytest.approx(3.282, abs=1e-3) and lower_bound(50, 50, 100) == 0.0
    )
    fpr = highest(10, 100)
    mu = 2 * float(stats.norm.isf(fpr))
    assert lower_bound(10, 10, 100, gaussian=True) == pytest.approx(
        epsilon([Releases(1 / mu)], DELTA)
    )


def test_guesses_of_canaries_bound_epsilon() -> None:
    assert one_run_bound(50, 100, 1000) == 0.0
    some = one_run_bound(190, 200, 1000)
    assert 2.0 < some < one_run_bound(200, 200, 1000) < 6.0
    assert some > one_run_bound(190, 200, 100_000)  # δ counts for each canary
