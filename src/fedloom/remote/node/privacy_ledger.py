"""The privacy budget of a node's own rows: the ε that private messages about each cohort have
spent.

The record continues over runs, callers and methods, because all of them concern the same people. A
release is recorded before it is made, so that one that is lost counts too. A reply that is repeated
from the store is not released again and costs nothing.

ε is that of all releases of a cohort together, between data sets of which one has a row that counts
as nothing in the other; the number of rows is public. Messages without noise have no ε and are not
in the record.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fedloom.core.errors import PrivacyBudgetSpent
from fedloom.protect.accountant import Releases, epsilon, noise_for
from fedloom.remote.node.budget import Budget, Spent, SpentReleases


def charge(
    budget: Budget, cohort: str, file: Path, release: Releases, limit: float, delta: float
) -> None:
    """Record further releases, on disk before they are made.

    Args:
        budget: the node's.
        cohort: the people of the rows.
        file: of the rows.
        release: the new ones.
        limit: of ε of all releases about the cohort.
        delta: the δ of this ε.

    Raises:
        PrivacyBudgetSpent: they would exceed the limit, or the record allows nothing.
        OSError: the record cannot be written; nothing may be released.
    """

    budget.spend(cohort, file, partial(take, releases=[release], limit=limit, delta=delta))


def take(
    spent: Spent, *, releases: Sequence[Releases], limit: float, delta: float, what: str = "call"
) -> None:
    """Count releases of a call, or of a whole run: see `charge`."""
    for release in releases:
        add(spent, release)
    found = epsilon(spent.all_releases(), delta)
    if not found <= limit:
        raise PrivacyBudgetSpent(
            f"the privacy budget of these rows is ε = {limit:g} at δ = {delta:g}, and this {what} "
            f"would make it {math.ceil(found * 1000) / 1000:g}: use more noise or fewer rounds, or "
            "ask the node's owner to raise epsilon"
        )


def add(spent: Spent, release: Releases) -> None:
    """Count releases among equal ones."""
    before = {(one.sigma, one.rate, one.excess): one.count for one in spent.releases}
    which = (release.sigma, release.rate, release.excess)
    after = {**before, which: before.get(which, 0) + release.count}
    spent.releases = [
        SpentReleases(sigma=s, rate=rate, count=n, excess=more)
        for (s, rate, more), n in after.items()
    ]


def exhaust(spent: Spent, limit: float, delta: float) -> None:
    """Count a release of the whole limit of ε; none if there is no limit."""
    if not math.isinf(limit):
        add(spent, Releases(noise_for(limit, delta), 1, 1.0))


def lines(budget: Budget, cohorts: dict[str, tuple[float, float]]) -> Iterator[str]:
    """A line for each cohort: the spent ε, its limit, and the releases.

    Args:
        budget: the record.
        cohorts: the limit of ε, and δ, by the name of the cohort.
    """
    for name, (limit, delta) in cohorts.items():
        spent = budget.spent(name).all_releases()
        count = sum(one.count for one in spent)
        of = "no limit" if math.isinf(limit) else f"of {limit:g}"
        yield f"{name}: ε = {epsilon(spent, delta):.3f} {of} at δ = {delta:g}, {count} releases"
