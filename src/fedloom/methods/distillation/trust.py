"""Trust: weighing each client's answer to a public row by how near the row is to the client's own
rows.

A client that never saw a class still answers for it, nearly as surely. So under skewed
classes the few clients that know the class are outvoted. If client n has n_n rows of density p_n(x)
and posterior p_n(y|x), the posterior of all rows pooled is

    p(y|x) = Σ_n w_n(x) p_n(y|x),    w_n(x) = n_n p_n(x) / Σ_m n_m p_m(x)

so weights come from densities and average probabilities, not logits. The settings of `trust`:

    uniform      equal weights, as the papers of these methods have them
    confidence   softmax of -H(p_n(x)) / T over clients; nothing more is sent
    distance     softmax of -(d_n(x) / h) / T: d_n is the mean distance to the k nearest own rows
    select       clients whose d_n(x) is within the 75 % quantile of their own rows' distances; all clients, if none is
    kernel       ∝ n_n max(⟨φ(x), μ_n⟩, 10^-3): μ_n is a mean embedding of the own rows, with noise (`protect.kernel`)

Sources: `select` after J. Shao, F. Wu, J. Zhang, "Selective knowledge sharing for
privacy-preserving federated distillation without a good teacher", Nature Communications 15, 2024;
the identity above is Bayes' rule; `distance` and `kernel` are ours.

Before a client's first answer the server asks it once for an introduction: its distances to all
public rows in few bits (`distance`), one bit for each (`select`), or its mean embedding and number
of rows (`kernel`). Later answers cost nothing more. Only `kernel` with `trust_epsilon` has a
guarantee, for one row of a client; docs/trust-weighted.md has the measured leaks.

Differs:
    `select` has nearest neighbours in place of KuLSIF's density ratio, so it needs no auxiliary
        rows, and no filter of ambiguous rows at the server.
    h is the median distance to the 5 nearest within the public rows, so that clients' distances are
        comparable without a message about own rows.
    Claims are bounded: ‖μ_n‖ by the median norm, n_n by four times the median, and any weight by
        `trust_cap`.
"""  # noqa: E501

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedloom.core.context import PublicSet
from fedloom.core.page import (
    Aggregator,
    Federation,
    Guarantee,
    MethodError,
    Party,
    Shape,
    Template,
    Tree,
    floats,
)
from fedloom.core.rng import stream
from fedloom.protect import kernel, labels
from fedloom.protect.accountant import REPLACED, Releases, epsilon, noise_for
from fedloom.protect.noise import charge, draws

WIDTH_NEIGHBOURS, WIDTH_ROWS = 5, 1000
"""Neighbours, and first public rows, from which h is measured."""
FARTHEST = 4.0
"""Distances are sent as steps of [0, FARTHEST] in units of h."""
QUANTILE = 0.75
"""Share of a client's own rows that would pass its own selection."""
FEATURES = 512
"""D: numbers of a mean embedding."""
FLOOR = 1e-3
"""Smallest density of `kernel`, so that a row that nobody knows is shared."""
MOST_ROWS = 4
"""Claimed numbers of rows count up to this multiple of their median."""
AT_ONCE = 512
"""Rows whose distances are computed at once."""
LITTLE = 0.05
"""Weight of all others below which a client has nothing to learn from them."""
NO_NOISE = "mean embedding without noise"
"""The note of a client whose introduction has no privacy guarantee."""
INTRODUCED = "private introductions"
"""The note of a client's introduction with noise."""
INTRODUCED_BY = ("trust", "trust_neighbours", "trust_bits", "trust_space")
"""The settings that an introduction without noise depends on."""
PRESETS = {"trusted": {"trust": "kernel", "trust_epsilon": 2.0}}
"""The preset of methods with trust: private mean embeddings."""


class TrustSettings(BaseModel):
    """The settings of trust, for configs of methods that average clients' answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    trust: Literal["uniform", "confidence", "distance", "select", "kernel"] = "uniform"
    """Weights of the clients' answers to a public row: equal, by confidence, by distance to their
    own rows, equal among the clients near the row, or by mean embeddings of their own rows, with
    differential privacy.
    """
    trust_temperature: float = Field(0.1, gt=0)
    """Temperature of the weights by confidence (nats) and distance (units of h); a smaller one
    trusts fewer clients.
    """
    trust_neighbours: int = Field(5, ge=3)
    """Number of nearest own rows of a distance (k). With fewer than 3 a distance would reveal
    single rows; several runs with other k reveal them too.
    """
    trust_bits: int | None = Field(4, ge=1, le=8)
    """Bits of a sent distance; None for float32, which reveals most about the own rows."""
    trust_cap: float = Field(1.0, gt=0, le=1)
    """Largest weight of a client for a row; 0.34 tolerates one dishonest client among those with
    similar rows.
    """
    trust_space: str = Field("rows", pattern=r"^(rows|public:[1-9][0-9]*)$")
    """Space of distances: the flattened rows, or "public:R", their first R principal components on
    the public rows.
    """
    trust_epsilon: float = Field(0.0, ge=0)
    """ε of a client's mean embedding, for one row of it that is replaced; 0 for no noise and no
    guarantee.
    """
    trust_delta: float = Field(1e-5, gt=0, lt=1)
    """δ of a client's mean embedding."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: trust weighs single answers."""
        if self.trust != "uniform":
            return (
                f'params.trust = "{self.trust}" weighs single answers by what their clients '
                "know: set one of the two"
            )
        inherited: str = super().refuses(aggregator)  # type: ignore[misc]
        return inherited

    @property
    def trust_introduces(self) -> bool:
        """Whether clients send an introduction, and the server reads the public rows."""
        return self.trust in ("distance", "select", "kernel")

    @property
    def introduction(self) -> dict[str, str] | None:
        """See `MethodConfig.introduction`."""
        if not self.trust_introduces or introduction_sigma(self):
            return None  # one with noise is charged by its ε
        return {name: str(getattr(self, name)) for name in INTRODUCED_BY}

    @property
    def exact_introduction(self) -> str:
        """See `MethodConfig.exact_introduction`."""
        exact = self.trust == "distance" and self.trust_bits is None
        return "distances are sent in few bits: set params.trust_bits, such as 4" if exact else ""

    @property
    def warnings(self) -> Mapping[str, str]:
        """The warnings of the method, and the one for an introduction without noise."""
        inherited: Mapping[str, str] = super().warnings  # type: ignore[misc]
        return {
            **inherited,
            NO_NOISE: "its mean embedding is sent without noise: set params.trust_epsilon, such as 2",  # noqa: E501
        }

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The privacy guarantee of the mean embeddings, one of each client."""
        sigma = introduction_sigma(self)
        if not sigma:
            return ()

        def spent(introductions: Sequence[float]) -> float:
            return epsilon([Releases(sigma, len(introductions))], self.trust_delta)

        once = lambda party, rounds: [1.0]
        return (
            Guarantee(
                "mean embedding", REPLACED, self.trust_delta, INTRODUCED, spent, planned=once
            ),
        )

    def charges(self, party: Any, rounds: Sequence[int]) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`: once, in the first round of a client."""
        sigma = introduction_sigma(self)
        return [(2 * sigma, 1, 1.0)] if rounds and sigma else []

    @property
    def server_reads_public(self) -> bool:
        """Whether the server needs the public rows with these settings."""
        return self.trust_introduces


def introduction_sigma(cfg: TrustSettings) -> float:
    """The noise multiplier of a mean embedding; 0 for no noise, or no embedding."""
    if cfg.trust != "kernel" or not cfg.trust_epsilon:
        return 0.0
    return noise_for(cfg.trust_epsilon, cfg.trust_delta)


TrustT_co = TypeVar("TrustT_co", bound=TrustSettings, covariant=True)


class TrustingServer(Party[TrustT_co]):
    """A server that weighs its clients' answers, for pages to derive from. Its state has the
    clients' `introductions` by number, if they send any.
    """

    introductions: dict[str, Any]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names in STATE, and `introductions`."""
        return (*self.STATE, "introductions") if self.cfg.trust_introduces else self.STATE


Server: TypeAlias = TrustingServer[TrustSettings]


def init(server: Server) -> None:
    """Set the server's state: no introductions yet.

    Raises:
        ConfigError: `confidence` in a number without a variance.
    """
    if server.cfg.trust == "confidence":
        server.context.task.certainty(torch.zeros(1, server.context.task.width))
    if server.cfg.trust_introduces:
        server.introductions = {}


# -- the client ------------------------------------------------------------------------------------


def introduce(party: Party[object]) -> dict[str, Tree]:
    """A client's introduction, from its own rows alone; see `template`.

    Raises:
        MethodError: the run's config asks for none, so that no server gets one all the same.
    """
    cfg = party.cfg
    if not isinstance(cfg, TrustSettings) or not cfg.trust_introduces:
        raise MethodError("this run's params.trust needs no introduction: refused")
    space = space_of(party.public_set, cfg.trust_space)
    own = space.place(party.data.every)
    if cfg.trust == "kernel":
        mean = kernel.mean_embedding(own, space.omega)
        sigma = introduction_sigma(cfg)
        party.note(NO_NOISE, float(not sigma))
        if sigma:
            charge(party, 2 * sigma)  # a row that counts as nothing moves the mean by 1 / n
            party.note(INTRODUCED, 1.0)
            mean = kernel.private_mean(mean, len(own), sigma, draws(party, "trust"))
        return {"mean": mean.float(), "rows": party.row_count}
    far = neighbour_distance(space.rows, own, cfg.trust_neighbours)
    if cfg.trust == "select":
        among = neighbour_distance(own, own, cfg.trust_neighbours, itself=True)
        return {
            "scores": labels.pack((far <= among.quantile(QUANTILE))[:, None].to(torch.uint8), 1)
        }
    if cfg.trust_bits is None:
        return {"scores": (far / space.width).float()}
    steps = 2**cfg.trust_bits - 1
    coded = (far / space.width / FARTHEST).clamp(max=1).mul(steps).round().to(torch.uint8)
    return {"scores": labels.pack(coded[:, None], cfg.trust_bits)}


class Space:
    """The space of distances, measured on the public rows: the same at every party."""

    def __init__(self, public: PublicSet, name: str) -> None:
        self.mean, self.directions = torch.zeros((), dtype=torch.float64), None
        rows = public.rows.every.flatten(1).double()
        if name != "rows":
            self.mean = rows.mean(0)
            apart = rows - self.mean
            self.directions = torch.linalg.eigh(apart.T @ apart)[1].flip(1)[
                :, : int(name.partition(":")[2])
            ]
        self.rows = self.place(rows)
        first = self.rows[:WIDTH_ROWS]
        width = neighbour_distance(first, first, WIDTH_NEIGHBOURS, itself=True).median()
        self.width = float(width.clamp_min(torch.finfo(width.dtype).tiny))
        """h: the median over public rows of the mean distance to their nearest neighbours among
        them.
        """
        draws = stream(public.seed, "trust features")
        self.omega = kernel.frequencies(self.rows.shape[1], FEATURES, self.width, draws).to(
            rows.device
        )
        """The frequencies (D / 2, d) of the mean embeddings."""

    def place(self, x: Tensor) -> Tensor:
        """Rows x (n, ...) in this space: (n, d) float64."""
        flat = x.flatten(1).double()
        return flat if self.directions is None else (flat - self.mean) @ self.directions


SPACES: WeakKeyDictionary[PublicSet, dict[str, Space]] = WeakKeyDictionary()


def space_of(public: PublicSet, name: str) -> Space:
    """The space of distances of this name, from the cache of this process or measured now."""
    known = SPACES.setdefault(public, {})
    if name not in known:
        known[name] = Space(public, name)
    return known[name]


def neighbour_distance(x: Tensor, rows: Tensor, k: int, *, itself: bool = False) -> Tensor:
    """The mean distance (n,) of each of x (n, d) to its k nearest rows (m, d), or to all, if they
    are fewer.

    With `itself`, x are the rows, and none is its own neighbour.
    """
    k = min(k, len(rows) - itself)
    if k < 1:  # a single row has no neighbour
        return x.new_zeros(len(x))
    means = []
    for first in range(0, len(x), AT_ONCE):
        distances = torch.cdist(
            x[first : first + AT_ONCE], rows, compute_mode="donot_use_mm_for_euclid_dist"
        )
        if itself:
            distances[range(len(distances)), range(first, first + len(distances))] = torch.inf
        means.append(distances.topk(k, largest=False).values.mean(1))
    return torch.cat(means)


# -- the server ------------------------------------------------------------------------------------


def template(cfg: TrustSettings, rows: int) -> Template:
    """Template of an introduction, with this number of public rows."""
    if cfg.trust == "kernel":
        return {"mean": floats(FEATURES), "rows": Shape("int64")}
    if cfg.trust == "select":
        return {"scores": Shape("uint8", labels.size_of(rows, 1))}
    return {
        "scores": floats(rows)
        if cfg.trust_bits is None
        else Shape("uint8", labels.size_of(rows, cfg.trust_bits))
    }


def meet(fed: Federation, server: Server, clients: Sequence[int]) -> None:
    """Ask the clients that the server does not know yet for their introduction."""
    if not server.cfg.trust_introduces:
        return
    new = [n for n in clients if str(n) not in server.introductions]
    expect = template(server.cfg, len(server.public_set.rows))
    if new:
        replies = fed.call(new, "introduce", expect=expect)
        server.introductions = {
            **server.introductions,
            **{str(n): reply for n, reply in replies.items()},
        }


def shares(
    server: Server, clients: Sequence[int], rows: Callable[[], Tensor], logits: Tensor
) -> Tensor:
    """The weights (n, B) float64 of these clients' answers to public rows, which sum to 1 over
    clients.

    A client without an introduction counts as the mean of the others.

    Args:
        server: holds the introductions.
        clients: their numbers, in the order of the answers.
        rows: gives the public rows' numbers (B,).
        logits: (n, B, K), for their confidence.
    """
    cfg = server.cfg
    if cfg.trust == "confidence":
        sure = server.context.task.certainty(logits)
        return capped(torch.softmax(sure / cfg.trust_temperature, 0), cfg.trust_cap)
    known = [n for n in clients if str(n) in server.introductions]
    if not known:
        return logits.new_full(logits.shape[:2], 1 / len(clients), dtype=torch.float64)
    scores = {"kernel": densities, "select": selected, "distance": nearness}[cfg.trust](
        server, known, rows()
    )
    found = dict(zip(known, scores, strict=True))
    scores = torch.stack([found.get(n, scores.mean(0)) for n in clients])
    return capped(scores / scores.sum(0), cfg.trust_cap)


def average(
    server: Server,
    clients: Sequence[int],
    rows: Callable[[], Tensor],
    answers: Tensor,
    logits: Tensor,
) -> tuple[Tensor, Tensor]:
    """The mean (B, K) of the clients' answers (n, B, K), and their weights (n, B).

    The answers are the logits themselves or probabilities. For the other arguments see `shares`.
    """
    weights = shares(server, clients, rows, logits)
    return weighted(answers, weights), weights


def nearness(server: Server, clients: Sequence[int], rows: Tensor) -> Tensor:
    """exp(-(d / h) / T) (n, B), over the nearest client's: none of them is all zero."""
    cfg, total = server.cfg, len(server.public_set.rows)
    sent = [server.introductions[str(n)]["scores"] for n in clients]
    if cfg.trust_bits is None:
        far = torch.stack(sent)[:, rows].double().clamp(0, FARTHEST)
    else:
        steps = 2**cfg.trust_bits - 1
        coded = [labels.unpack(x, cfg.trust_bits, total, 1)[:, 0] for x in sent]
        far = torch.stack(coded)[:, rows].double() * FARTHEST / steps
    return torch.exp((far.amin(0) - far) / cfg.trust_temperature)


def selected(server: Server, clients: Sequence[int], rows: Tensor) -> Tensor:
    """1 (n, B) for the clients that are near a row; for all, if none is."""
    total = len(server.public_set.rows)
    passed = torch.stack(
        [labels.unpack(server.introductions[str(n)]["scores"], 1, total, 1)[:, 0] for n in clients]
    )
    passed = passed[:, rows].double()
    some: Tensor = passed.any(0)
    return torch.where(some, passed, 1.0)


def densities(server: Server, clients: Sequence[int], rows: Tensor) -> Tensor:
    """n max(⟨φ(x), μ⟩, 10^-3) (n, B), with claims bounded by the medians of these clients."""
    means = torch.stack([server.introductions[str(n)]["mean"] for n in clients]).double()
    counts = (
        torch.stack([server.introductions[str(n)]["rows"] for n in clients]).double().clamp_min(0)
    )
    norms = means.norm(dim=1)
    means = means * (norms.median() / norms.clamp_min(norms.median()).clamp_min(1e-12))[:, None]
    counts = counts.clamp(max=MOST_ROWS * counts.median()).clamp_min(1)
    space = space_of(server.public_set, server.cfg.trust_space)
    phi = kernel.features(space.rows[rows], space.omega)
    found: Tensor = counts[:, None] * (means @ phi.T).clamp_min(FLOOR)
    return found


def capped(weights: Tensor, cap: float) -> Tensor:
    """Weights (n, B) that sum to 1 over clients, none above `cap`: what is cut goes to the others
    in proportion.
    """
    n = len(weights)
    if cap * n <= 1:
        return torch.full_like(weights, 1 / n)
    fixed = torch.zeros_like(weights, dtype=torch.bool)
    for _ in range(n):
        over = ~fixed & (weights > cap)
        if not over.any():
            break
        fixed |= over
        free, rest = torch.where(fixed, 0.0, weights), 1 - cap * fixed.sum(0)
        even = rest / (~fixed).sum(0).clamp_min(1)
        share = torch.where(free.sum(0) > 0, free * (rest / free.sum(0).clamp_min(1e-300)), even)
        weights = torch.where(fixed, cap, share)
    return weights


def weighted(answers: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean (B, K) of answers (n, B, K), summed in float64 in the clients' order."""
    total: Tensor = (weights[..., None] * answers.double()).sum(0)
    return total.to(answers.dtype)


def without(own: Tensor, mean: Tensor, share: Tensor) -> Tensor:
    """The weighted mean (B, K) of the others, from the mean of all, the own answer (B, K) and its
    weights `share` (B,).

    Where nobody else knows the row there is nothing to learn: there it is the own answer.
    """
    alone = 1 - share < LITTLE
    rest = (mean - share[:, None] * own) / torch.where(alone, 1.0, 1 - share)[:, None]
    return torch.where(alone[:, None], own, rest)
