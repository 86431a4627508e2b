"""Limits of the owner of a node's rows on what all runs together may ask about a cohort."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party, telling
from fedloom.data.schema import read_columns
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.demand import evaluations, taking_part
from fedloom.protect.accountant import Releases
from fedloom.remote.node import privacy_ledger
from fedloom.remote.node.budget import Budget, Spent
from fedloom.remote.node.config import NodeData
from fedloom.remote.node.looks import OWN, split_of, take_looks
from fedloom.remote.rpc_errors import refused


@dataclass(frozen=True)
class Demand:
    """What a run will ask about a cohort from some round on, at most.

    Attributes:
        looks: scores.
        answers: rows of the coordinator to be answered.
        releases: with differential privacy.
    """

    looks: int = 0
    answers: int = 0
    releases: tuple[Releases, ...] = ()


def demand(
    run: RunConfig,
    party: Party[MethodConfig],
    rounds: int,
    *,
    scored: bool,
    answers: int = 0,
    done: int = 0,
) -> Demand:
    """What a run asks of a party after so many rounds are done.

    Args:
        run: its config.
        party: its party here.
        rounds: of the run.
        scored: whether its models are scored here.
        answers: rows of the coordinator that the run asks about, all rounds together.
        done: rounds that are done.
    """
    cfg, context = party.cfg, party.context
    looks = evaluations(run, cfg, rounds, done) * (1 + len(cfg.eval_modes)) if scored else 0
    turns = taking_part(run, cfg, context.id, rounds, done)
    charged = cfg.charges(party, turns) if context.secret is not None else ()
    whole: dict[Releases, int] = {}
    for sigma, count, rate, *excess in charged:
        one = Releases(sigma, 1, rate, *excess)
        whole[one] = whole.get(one, 0) + int(count)
    releases = tuple(replace(one, count=count) for one, count in whole.items())
    return Demand(looks, answers, releases)


UNKNOWN = "unknown"
"""In place of the settings of an introduction that a lost record may have had: no settings are
these.
"""


def exhaust(spent: Spent, data: NodeData) -> None:
    """Count all that the owner allows about these rows, as a lost part of the record may have had
    it.
    """
    assert data.rows is not None
    privacy_ledger.exhaust(spent, data.epsilon, data.delta)
    spent.looks = max(spent.looks, data.looks)
    spent.ids = max(
        spent.ids, 2 * _count(data.rows, data) if data.ids_total is None else data.ids_total
    )
    answers = 2 * _count(data.public, data) if data.max_answers is None else data.max_answers
    spent.answers = max(spent.answers, answers)
    spent.introduced = spent.introduced or UNKNOWN


def _count(path: Path | None, data: NodeData) -> int:
    """The number of rows of a table, or of files in a folder of pictures."""
    if path is None:
        return 0
    if path.is_dir() and not any(path.rglob("*.parquet")):
        return sum(file.is_file() for file in path.rglob("*"))
    columns, _ = read_columns(path, path.stem, data.own.options.grammar)
    return max(map(len, columns.values()), default=0)


class OwnerLimits:
    """The limits of one run's party.

    Args:
        budget: the node's.
        cohort: the people of the rows.
        data: the rows and their limits.
        party: of the run.
    """

    def __init__(
        self, budget: Budget, cohort: str, data: NodeData, party: Party[MethodConfig]
    ) -> None:
        assert data.rows is not None
        self._budget, self._cohort, self._data, self._party = budget, cohort, data, party
        self._file: Path = data.rows

    def same(self, other: "OwnerLimits") -> bool:
        """Whether both are about the same people."""
        return self._cohort == other._cohort

    def check(self, method: str, given: Mapping[str, Any]) -> None:
        """Count what a call lets out, before it is answered.

        Raises:
            CallRefused: it would be more than the owner allows.
            PrivacyBudgetSpent, OSError: the record allows nothing, or cannot be written.
        """
        party = self._party
        known = party.TELLS is not None or party.context.public is not None
        if known and method in telling(type(party), "introduces"):
            self._introduce()
        if method in telling(type(party), "answers"):
            self._answer(self._asked(given))

    def _asked(self, given: Mapping[str, Any]) -> int:
        """How many rows arguments hold; of a page that does not declare where they are, each tensor
        that could be rows.
        """
        own = self._party.data.x(torch.arange(1)).shape[1:]
        found = [leaf for _, leaf in message.leaves(given) if isinstance(leaf, Tensor)]
        if self._party.TELLS is None:
            return sum(len(x) for x in found if x.dim() > 1 and x[:1].numel() == own.numel())
        if any(x.shape[1:] != own for x in found):  # one row could hold many
            raise refused("rows to be answered must have the shape of this node's own")
        return sum(map(len, found))

    def _introduce(self) -> None:
        """One set of settings for all runs: two of them tell a distance to a single row."""
        cfg, context = self._party.cfg, self._party.context
        facts = cfg.introduction
        if facts is None:
            return
        if cfg.exact_introduction and not self._data.exact_distances:
            raise refused(cfg.exact_introduction)
        public = "" if context.public is None else context.public.digest
        known = message.digest({**facts, "public": public, "classes": context.classes})

        def change(spent: Spent) -> None:
            if spent.introduced not in ("", known):
                raise refused(
                    "these rows were introduced with other trust settings or public rows, and "
                    "are only once"
                )
            spent.introduced = known

        self._budget.spend(self._cohort, self._file, change)

    def _answer(self, rows: int) -> None:
        if not rows:
            return
        self._budget.spend(self._cohort, self._file, partial(self._take_answers, rows=rows))

    def _take_answers(self, spent: Spent, *, rows: int) -> None:
        public, limit = self._party.context.public, self._data.max_answers
        if limit is None:
            limit = 2 * len(public.rows) if public is not None else 0
        left = max(0, limit - spent.answers)
        spent.answers += rows
        if spent.answers > limit:
            raise refused(
                f"this node answers at most {limit} rows of coordinators in all runs, of which "
                f"{left} are left, and this run asks for {rows} (max_answers): ask about fewer "
                f"rows, or ask the node's owner to set max_answers = {spent.answers}"
            )

    def afford(self, demand: Demand, others: Sequence[Demand] = ()) -> None:
        """Count all that a run will ask, before it begins, by what counts it later; the record
        stays as it is.

        Args:
            demand: of the run.
            others: what runs under way here will still ask about these people.

        Raises:
            CallRefused: it would be more than the owner allows.
            PrivacyBudgetSpent: the same, or the record allows nothing.
        """
        if not any((demand.looks, demand.answers, demand.releases)):
            return
        data = self._data

        def change(spent: Spent) -> None:
            for other in others:
                spent.looks += other.looks
                for release in other.releases:
                    privacy_ledger.add(spent, release)
            if demand.looks:
                take_looks(
                    spent, count=demand.looks, limit=data.looks, split=split_of(self._party, OWN)
                )
            if demand.answers:
                self._take_answers(spent, rows=demand.answers)
            if demand.releases:
                privacy_ledger.take(
                    spent,
                    releases=demand.releases,
                    limit=data.epsilon,
                    delta=data.delta,
                    what="whole run",
                )

        self._budget.spend(self._cohort, self._file, change, trial=True)
