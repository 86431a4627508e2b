"""Robust aggregation, as a setting of every page that averages clients' weights or answers: `protect.robust` has the
rules.

With `robust = "none"` a page takes the mean of its paper. With another rule it counts all clients alike, whatever
number of rows they claim, and skips a step for which there are fewer replies than the rule needs.

Among peers a rule is applied by each peer, around its own weights, which are one of the models: `clip` is then
ClippedGossip (L. He, S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022),
and keeps the weights of the method, as `centered` does. Where a method weighs models by what it knows of them, the
other rules are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedloom.core.page import Federation, MethodError, Party, weighted_mean
from fedloom.methods import steps
from fedloom.protect.robust import Rule, combine_logits, combine_probabilities, combine_trees, combine_values, needed

WEIGHTED = ("none", "clip", "centered")
"""The rules that can weigh models."""


class RobustSettings(BaseModel):
    """The settings of robust aggregation, for configs of methods that average clients' weights or answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    robust: Rule = "none"
    """How clients' weights or answers are combined: `none` is the method's mean; the others count all clients alike and
    withstand some that send arbitrary numbers: `median`, `trimmed`, `krum`, `multikrum`, `clip`, `centered`."""
    robust_f: int = Field(1, ge=1)
    """Number of clients with arbitrary numbers to withstand. Needs 2 f + 1 participants, Krum 2 f + 3."""

    @model_validator(mode="after")
    def _visible(self) -> "RobustSettings":
        if getattr(self, "secure", False) and self.robust != "none":
            raise ValueError(
                f"secure sums hide the single messages that robust = {self.robust!r} needs: set one of the two"
            )
        return self


# -- at a server ---------------------------------------------------------------------------------------------------


def check(server: Party[Any], clients: int | None = None) -> None:
    """Check that a round can have as many replies as the rule needs. For a server's `setup`.

    Args:
        server: of a method with `RobustSettings`.
        clients: the number of clients; None for all.

    Raises:
        MethodError: it cannot.
    """
    cfg, participants = server.cfg, server.context.parties if clients is None else clients
    participants = min(participants, getattr(cfg, "clients_per_round", None) or participants)
    if participants < needed(cfg.robust, cfg.robust_f):
        raise MethodError(too_few(cfg, f"participants in a round, not {participants}"))


def too_few(cfg: Any, there_are: str) -> str:
    """The error message for a rule that needs more than `there_are`."""
    return (
        f"params.robust = {cfg.robust!r} with robust_f = {cfg.robust_f} needs {needed(cfg.robust, cfg.robust_f)} "
        f"{there_are}: add clients or lower params.robust_f"
    )


def least_replies(cfg: Any, least: int = 1) -> int:
    """The number of replies without which a step is skipped: that of the rule, but at least `least`."""
    return max(least, needed(cfg.robust, cfg.robust_f))


def combined(trees: Sequence[Any], rows: Sequence[int], cfg: Any, center: Mapping[str, Any] | None) -> Any:
    """The mean of trees of one structure, weighted by rows; or by the rule around `center`, without row counts. Without
    a center it is the median."""
    if cfg.robust == "none":
        return weighted_mean(trees, rows)
    if center is None:
        center = combine_trees(trees, "median", f=cfg.robust_f, center=trees[0])
    return combine_trees(trees, cfg.robust, f=cfg.robust_f, center=center)


def combine_weights(server: Any, replies: Mapping[int, Any]) -> None:
    """Set a server's `weights` from the replies' `weights` and `rows`: line 8 of FedAvg, or the rule."""
    rows = [int(reply["rows"]) for reply in replies.values()]
    server.weights = combined([reply["weights"] for reply in replies.values()], rows, server.cfg, server.weights)


def all_rows(claims: Tensor, cfg: Any) -> int:
    """The number of rows of all clients, from what each claims (n,); with a rule n times the median claim."""
    return int(claims.sum() if cfg.robust == "none" or not len(claims) else len(claims) * claims.median())


def total(trees: Sequence[Mapping[str, Tensor]], like: Mapping[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """The sum of trees like `like`; or their number times their aggregate by the rule, around zero."""
    found = {k: torch.zeros_like(x) for k, x in like.items()}
    if cfg.robust != "none" and trees:
        mean = combine_trees(trees, cfg.robust, f=cfg.robust_f, center=found)
        return {k: len(trees) * x for k, x in mean.items()}
    for tree in trees:
        for k, x in tree.items():
            found[k] += x
    return found


def mean_answer(answers: Tensor, cfg: Any, of: Literal["logits", "probabilities", "values"]) -> Tensor:
    """The mean (...) over clients of answers (n, ...), or by the rule."""
    if cfg.robust == "none":
        return answers.mean(0)
    rule = {"logits": combine_logits, "probabilities": combine_probabilities, "values": combine_values}[of]
    return rule(answers, cfg.robust, f=cfg.robust_f)


def by_class(values: Tensor, present: Tensor, mean: Callable[[Tensor], Tensor], least: int) -> tuple[Tensor, Tensor]:
    """The `mean` (K, d) by class of clients' values (n, K, d), over the clients that have the class by the mask
    `present` (n, K); and a mask (K,) of the classes that at least `least` clients have. The others are 0."""
    found, enough = torch.zeros_like(values[0]), present.sum(0) >= least
    for k in enough.nonzero().flatten().tolist():
        found[k] = mean(values[present[:, k], k])
    return found, enough


# -- at a peer -----------------------------------------------------------------------------------------------------


def check_peers(fed: Federation, cfg: Any, most: int | None) -> None:
    """Check that each peer can get the models that the rule needs, its own among them.

    Args:
        fed: knows the graph.
        cfg: a config with `RobustSettings`.
        most: the largest number of neighbours that a peer asks; None for all.

    Raises:
        MethodError: a peer cannot.
    """
    if cfg.robust == "none":
        return
    everyone = fed.engine.ids
    for i in everyone:
        near = len(everyone) - 1 if fed.graph is None else len(fed.graph.get(i, ()))
        models = 1 + (near if most is None else min(near, most))
        if models < needed(cfg.robust, cfg.robust_f):
            raise MethodError(too_few(cfg, f"models at a peer, its own among them, but peer {i} gets at most {models}"))


def mix(party: Party[Any], models: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> None:
    """Set the party's weights to the weighted mean of the models in `weights`, its own among them, or by the rule
    around its own. With too few models for the rule it keeps its own."""
    cfg, own = party.cfg, party.context.id
    if len(weights) < needed(cfg.robust, cfg.robust_f):
        weights = {own: 1.0}
    elif cfg.robust != "none":
        steps.set_weights(party, around(party, [models[j] for j in weights], [*weights.values()]))
        steps.note_mixing(party, {j: weight / sum(weights.values()) for j, weight in weights.items()})
        return
    steps.average(party, models, weights)


def around(party: Party[Any], models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The aggregate of these models by the rule, around the party's own shared weights."""
    cfg = party.cfg
    share = torch.tensor(weights, dtype=torch.float64, device=party.context.device)
    center = steps.shared_weights(party)
    found: dict[str, Tensor] = combine_trees(
        models, cfg.robust, f=cfg.robust_f, center=center, weights=share / share.sum()
    )
    return found
