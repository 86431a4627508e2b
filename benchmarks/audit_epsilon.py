"""What attacks find of the ε that fedloom claims: `python -m benchmarks.audit_epsilon [SCALE]
[SEED]`.

A lower bound of ε from attacks must stay below each claim; and it must exceed the claim if the
noise is halved or a protection is reverted, or the attack is too weak to prove anything.

    A1  two worlds: two files that differ in one row, at a node that is asked crafted questions. The
        best classifier is chosen on half of the runs, by everything that leaves the node, and
        measured on the other half.
    A2  one run with many canaries, each in it or not (T. Steinke, M. Nasr, M. Jagielski, "Privacy
        Auditing with One (1) Training Run", NeurIPS 2023).
    A3  white box: every step is seen, and gradients are crafted (M. Nasr, J. Hayes, T. Steinke, B.
        Balle, F. Tramèr, M. Jagielski, N. Carlini, A. Terzis, "Tight Auditing of Differentially
        Private Machine Learning", USENIX 2023).

Rates have Clopper-Pearson bounds at 97.5 % each. ε of A1 is ln((1 - δ - FNR) / FPR); that of A3 is
ε of the largest Gaussian noise that allows both rates, as the paper does.
"""

import asyncio
import contextlib
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedloom._version import __version__
from fedloom.core import evaluation, message
from fedloom.core.fixed_point import threshold
from fedloom.core.message import leaves
from fedloom.core.templates import spell
from fedloom.data.options import DataOptions, OwnFile
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.settings import horizontal
from fedloom.methods.averaging import fedsgd_dp, private
from fedloom.methods.peer import selection
from fedloom.methods.tables import fedextra, steps
from fedloom.protect import kernel, noise
from fedloom.protect.accountant import Releases, epsilon, noise_for
from fedloom.protect.aggregators import Private
from fedloom.protect.noise import Draws
from fedloom.protect.privacy import clipped_rows
from fedloom.protect.skellam import skellam
from fedloom.remote import payload
from fedloom.remote.node import config as node_config
from fedloom.remote.node import looks, task_runner
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.service import NodeService
from fedloom.remote.rpc_errors import CallRefused
from fedloom.trees.exact import PARTS, residuals
from fedloom.trees.model import Trees

DELTA = 1e-5
RUN = "0123456789abcdef" * 2
FORM: dict[str, Any] = {
    "columns": ["a", "b"],
    "label": "kind",
    "classes": ["one", "two"],
    "scale": {"a": [0, 1], "b": [0, 1]},
}
ROWS, TRAINING = 180, 150
USUAL, ODD = "0.1,0.2,one", "60,-70,two"
"""The row in which the two files differ."""


# -- bounds ----------------------------------------------------------------------------------------


def highest(wrong: int, trials: int) -> float:
    """The upper Clopper-Pearson bound of a rate, at 97.5 %."""
    return 1.0 if wrong >= trials else float(stats.beta.ppf(0.975, wrong + 1, trials - wrong))


def lower_bound(false: int, missed: int, trials: int, gaussian: bool = False) -> float:
    """The smallest ε at `DELTA` that allows so few errors of an attack in so many trials of each
    world; of Gaussian noise if `gaussian`.
    """
    fpr, fnr = highest(false, trials), highest(missed, trials)
    if gaussian:
        mu = float(stats.norm.isf(fpr) - stats.norm.ppf(fnr))
        return epsilon([Releases(1 / mu)], DELTA) if mu > 1e-3 else 0.0
    ratios = [(1 - DELTA - fnr) / fpr, (1 - DELTA - fpr) / fnr]
    return max([0.0, *(math.log(r) for r in ratios if r > 0)])


def separated(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The lower bounds from scores (n,) of both worlds, by a threshold that is chosen on half of
    them: on this half, and on the other one, which alone counts.
    """
    half = len(one) // 2
    cuts = np.unique(np.concatenate([one[:half], other[:half]]))

    def found(cut: float, part: slice) -> float:
        a, b = one[part], other[part]
        return max(
            lower_bound(int((a > cut).sum()), int((b <= cut).sum()), len(a)),
            lower_bound(int((a <= cut).sum()), int((b > cut).sum()), len(a)),
        )

    quick = max(cuts[:: max(1, len(cuts) // 40)], key=lambda cut: found(float(cut), slice(half)))
    return found(float(quick), slice(half)), found(float(quick), slice(half, None))


def split_at(one: np.ndarray, other: np.ndarray) -> float:
    """The lower bound of Gaussian noise from scores (n,) of both worlds, by the middle between the
    means of a fifth of them, on the others. Additive noise needs no better threshold, and no search
    for one.
    """
    few = len(one) // 5
    cut = (one[:few].mean() + other[:few].mean()) / 2
    low, high = sorted((one, other), key=lambda x: x[:few].mean())
    return lower_bound(
        int((low[few:] > cut).sum()), int((high[few:] <= cut).sum()), len(one) - few, gaussian=True
    )


def one_run_bound(right: int, guesses: int, canaries: int, confidence: float = 0.95) -> float:
    """The smallest ε at `DELTA` that allows so many right guesses of canaries: Steinke et al.,
    Theorem 5.2.
    """

    def probability(eps: float) -> float:
        q = 1 / (1 + math.exp(-eps))
        above = float(stats.binom.sf(right - 1, guesses, q))
        among = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, q)) / np.arange(
            1, right + 1
        )
        return above + 2 * canaries * DELTA * float(among.max(initial=0.0))

    low, high = 0.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < 1 - confidence else (low, middle)
    return low


@dataclass(frozen=True)
class Audit:
    """A claim and what attacks found.

    Attributes:
        name: of the claim and the attack.
        claim: ε at `DELTA`.
        found: the lower bound.
        broken: the lower bound where something is reverted, by what.
    """

    name: str
    claim: float
    found: float
    broken: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """Whether the attack stays below the claim, and exceeds it wherever something
        is reverted.
        """
        return self.found < self.claim and all(found > self.claim for found in self.broken.values())


@contextlib.contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Some attributes are others for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def drawing(seed: int, part: float = 1.0) -> Iterator[None]:
    """Noise that nobody can guess comes from this seed, so that an audit repeats, with this part of
    its deviation.
    """
    rng = np.random.default_rng(seed)
    normal = lambda count: part * rng.standard_normal(count)
    shared = lambda half, count: skellam(max(1, round(half * part**2)), count, rng.bytes)
    uniform = lambda count: 1 - rng.random(count)
    with changed(
        (noise, "_normal", normal), (noise, "_uniform", uniform), (noise, "skellam", shared)
    ):
        yield


# -- A1: two worlds, at a node ---------------------------------------------------------------------


class Node:
    """A node with a file, without a network, and a run with DP-SGD that is open there."""

    def __init__(self, folder: Path, row: str, run: Any) -> None:
        folder.mkdir(parents=True)
        rng = np.random.default_rng(3)
        form = run.data.row_schema
        label = {"classes": FORM["classes"]} if form.classes else {"label_scale": form.label_scale}
        words = form.classes or ("0.3", "-0.2")
        y = rng.integers(2, size=ROWS - 1)
        cells = zip(rng.normal(size=(ROWS - 1, 2)), y, range(1, ROWS), strict=True)
        parts = ("test", "train")
        lines = [f"{x:.3f},{z:.3f},{words[k]},{parts[n < TRAINING]}" for (x, z), k, n in cells]
        (folder / "own.csv").write_text("\n".join(["a,b,kind,part", f"{row},train", *lines, ""]))
        (folder / "state").mkdir()
        (folder / "state" / "secret").write_text("07" * 16)
        data = {"rows": folder / "own.csv", "keep": ["a", "b"], "label": "kind", **label}
        wards: Any = {"wards": {**data, "epsilon": math.inf, "test": "part"}}
        methods: Any = [run.method]
        where = {
            "name": "node",
            "insecure": True,
            "state": folder / "state",
            "callers": ["hub"],
            "approve": "off",
        }
        self.service = NodeService(NodeConfig(**where, methods=methods, data=wards))
        self._loop, self._call = asyncio.new_event_loop(), 0
        text = for_nodes(build(run, PrivateData())).model_dump_json()
        head: dict[str, Any] = {
            "protocol": payload.PROTOCOL,
            "version": __version__,
            "party": 0,
            "members": {},
            "resume": False,
            "answers": 0,
        }
        self.ask("open", payload.pack({**head, "run": RUN, "start": 1, "config": text}))

    def ask(self, kind: str, body: bytes) -> bytes:
        return self._loop.run_until_complete(self.service.answer("hub", kind, body))

    @property
    def count(self) -> int:
        """The trees that the party has."""
        (run,) = self.service._node_runs.values()
        party: Any = run.party
        return len(party.trees["root"])

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the party at first: names and shapes."""
        (run,) = self.service._node_runs.values()
        return {name: value.clone() for name, value in run.party.params.items()}

    def asked(
        self, method: str, t: int, shared: Mapping[str, Any]
    ) -> tuple[str, np.ndarray | None]:
        """What leaves the node for a question in round t: all but the numbers as text, and the
        numbers.
        """
        task = {"each": None, "reply_refs": {}, "fault": None, "seed": 7}
        head: dict[str, Any] = {
            "run": RUN,
            "start": 1,
            "call": self._call,
            "round": t,
            "method": method,
            "tasks": [task],
        }
        head |= {
            "leave": False,
            "expect": spell(None),
            "kept": [],
            "floor": 0,
            "deadline": 60.0,
            "mask": None,
        }
        self._call += 1
        try:
            answer = self.ask("do", payload.pack(head, message.encode(dict(shared))))
        except CallRefused as refusal:
            return f"{refusal.code}: {refusal.words}", None
        told, rest = payload.unpack(answer)
        if not rest:
            return f"{len(answer)} {told}", None
        reply: Any = payload.decoded(rest, 0)
        parts = [x for _, x in leaves(reply) if isinstance(x, Tensor) and x.dim()]
        numbers = torch.cat([x.flatten() for x in parts]).double().numpy() if parts else np.zeros(0)
        return (
            f"{len(answer)} {told} {reply.get('rows') if reply else reply} "
            f"{np.isfinite(numbers).all()}",
            numbers,
        )

    def close(self) -> None:
        self._loop.run_until_complete(self.service.close())
        self._loop.close()


def config(sigma: float, rounds: int, form: Mapping[str, Any], who: str = "own") -> Any:
    """A run with DP-SGD of one step a round over all rows, whose noise is added by these."""
    params: dict[str, Any] = {
        "batch_size": 1000,
        "epochs": 1,
        "momentum": 0,
        "dp": {"sigma": sigma},
    }
    values: dict[str, Any] = {
        "method": "fedsgd-dp" if who == "shares" else "fedavg-dp",
        "rounds": rounds,
        "models": {"pool": ["linear"]},
        "params": params,
    }
    if who == "shares":
        values["aggregate"] = {"secure": True, "colluders": 1}
    return check(
        {"run": {**values, "data": {"name": "wards", "clients": 7, "row_schema": form}}}
    ).run


STRATEGIES = ("honest", "threshold", "infinite")


def questions(like: Mapping[str, Tensor], strategy: str) -> dict[str, Tensor]:
    """Weights of a strategy: those of honest training, a threshold on a column, or infinity for one
    row.
    """
    rng = torch.Generator().manual_seed(1)
    if strategy == "honest":
        return {name: 0.3 * torch.randn(x.shape, generator=rng) for name, x in like.items()}
    found = {name: torch.zeros_like(x) for name, x in like.items()}
    first = next(name for name, x in like.items() if x.dim() == 2)
    found[first][:, 0] = torch.tensor([9e37, 9e37] if strategy == "infinite" else [10.0, -10.0])
    return found


def two_worlds(
    sigma: float,
    runs: int,
    seed: int,
    strategies: Sequence[str] = STRATEGIES,
    *,
    scaled: bool = True,
) -> float:
    """A1: the lower bound of ε of the strategy and classifier that are best on half of the runs."""
    bounds = list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder, drawing(seed):
        rounds = runs * len(strategies)
        form = FORM if scaled else {key: value for key, value in FORM.items() if key != "scale"}
        run = config(sigma, rounds, form)
        nodes = [Node(Path(folder) / str(k), row, run) for k, row in enumerate((USUAL, ODD))]
        try:
            for k, strategy in enumerate(strategies):
                sent = {"t": 0, "weights": questions(nodes[0].weights, strategy)}
                seen = [
                    [node.asked("update", k * runs + t, sent) for t in range(runs)]
                    for node in nodes
                ]
                bounds += [separated(*scores) for scores in _classifiers(seen, runs // 2)]
        finally:
            for node in nodes:
                node.close()
    return max(bounds)[1]


def _classifiers(
    seen: list[list[tuple[str, np.ndarray | None]]], half: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores of both worlds' runs: by the words, and by the numbers along the difference of the
    means of one half.
    """
    words = [[word for word, _ in world] for world in seen]
    odds = {w: words[1][:half].count(w) - words[0][:half].count(w) for w in {*words[0], *words[1]}}
    yield tuple(np.array([float(odds[w]) for w in world]) for world in words)  # type: ignore[misc]
    if all(numbers is not None for world in seen for _, numbers in world):
        vectors = [np.stack([numbers for _, numbers in world]) for world in seen]
        along = vectors[1][:half].mean(0) - vectors[0][:half].mean(0)
        yield tuple(world @ along for world in vectors)


def audit_node(runs: int, seed: int = 0, *, short: bool = False) -> Audit:
    """A1 of DP-SGD: one round, a row replaced, ε = 1. The `short` form leaves out the scale by own
    rows.
    """
    sigma, broken = 2 * noise_for(1.0, DELTA), {}
    nothing = lambda *_: ""
    with changed((private, "clipped_rows", multiplied), (task_runner, "LARGEST", math.inf)):
        broken["without D1"] = two_worlds(sigma, runs, seed, ["infinite"])
    if not short:
        with changed((horizontal, "unbounded", nothing), (node_config, "unbounded", nothing)):
            broken["without D3"] = two_worlds(sigma, runs, seed, ["threshold"], scaled=False)
    return Audit("A1 DP-SGD", 1.0, two_worlds(sigma, runs, seed, STRATEGIES[short:]), broken)


def multiplied(each: Tensor, most: float) -> Tensor:
    """Rows (n, d) that are clipped by a factor, as before D1: 0 times infinity is NaN."""
    return each * (most / torch.linalg.vector_norm(each, dim=1, keepdim=True).clamp_min(most))


def audit_choice(runs: int, seed: int = 0) -> Audit:
    """A1 of AFIND+: φ and the choice of neighbours, for a label that is replaced, ε = 1."""

    def peers(folder: Path) -> list[Any]:
        dp = {"target": "phi", "sigma": 2 * noise_for(1.0, DELTA), "clip": 0.1}
        values: Any = {"method": "afind-plus", "rounds": 1, "models": {"pool": ["mlp"]}}
        values |= {"params": {"threshold": "anchored", "probe_rows": ROWS, "dp": dp}}
        run = check(
            {"run": {**values, "data": {"name": "wards", "clients": 3, "row_schema": FORM}}}
        ).run
        sent, found = for_nodes(build(run, PrivateData())), []
        for k, row in enumerate((USUAL, USUAL.replace("one", "two"))):
            Node(folder / str(k), row, config(1.0, 1, FORM)).close()
            own = OwnFile(DataOptions(keep=("a", "b"), test="part"))
            files = PrivateData(rows=folder / str(k) / "own.csv", own=own)
            found.append(build_party(sent, 0, files, secret=7).party)
        return found

    def found(without_noise: bool) -> float:
        with tempfile.TemporaryDirectory() as folder, drawing(seed):
            pair = peers(Path(folder))
            phis = [torch.nn.functional.normalize(selection.initial_proxy(p), dim=0) for p in pair]
            between = torch.nn.functional.normalize(phis[0] + phis[1], dim=0) / 2
            question = between + torch.nn.functional.normalize(phis[0] - phis[1], dim=0) * 0.75**0.5
            here, scores = torch.tensor([False, True, False]), list[np.ndarray]()
            for party in pair:
                before, exact, told = party.neighbours, selection.initial_proxy(party), []
                for _ in range(runs):
                    own = {"phi": exact} if without_noise else {}
                    party.neighbours = {**before, **own}
                    party.compare(t=0, inbox={"1": {"phi": question}})
                    told.append(float(party.choose(here=here, open=False)[1]))
                scores.append(np.array(told))
        return separated(scores[0], scores[1])[1]

    return Audit("A1 choice of neighbours", 1.0, found(False), {"without D6": found(True)})


def forest(sigma: float, rounds: int, *, number: bool = False) -> Any:
    """A run of FedExtra with noise, whose bins are declared; for classes, or for a number."""
    dp = {"sigma": sigma, "grid": {"a": (-80.0, 80.0), "b": (-80.0, 80.0)}}
    values: dict[str, Any] = {
        "method": "fedextra",
        "rounds": rounds,
        "params": {"bins": 32, "depth": 1, "dp": dp},
    }
    label = {"label_scale": [0.0, 1.0]} if number else {"classes": FORM["classes"]}
    # bins are of declared ranges
    form = {"columns": FORM["columns"], "label": FORM["label"], **label}
    return check(
        {"run": {**values, "data": {"name": "wards", "clients": 7, "row_schema": form}}}
    ).run


def cut(at: int, low: float, high: float) -> Trees:
    """One tree: below the bin `at` of the first column a row gets the first value,
    else the second.
    """
    values = np.array([0, low, high]) * PARTS
    left = np.packbits(np.arange(32) < np.array([[at], [0], [0]]), axis=1)
    feature, child = np.array([0, -1, -1], np.int16), np.array([1, 0, 0], np.int32)
    return Trees(np.array([0], np.int32), feature, left, child, values.astype(np.int64)[:, None])


def audit_leaves(runs: int, seed: int = 0, *, number: bool = False) -> Audit:
    """A1 of FedExtra's sums of leaves, a row replaced, ε = 1: trees that are honest, that put the
    row alone into a leaf where it counts most, or that cannot predict where the row is.
    """
    # the odd row alone, whose class is certain to be the other one; its number is far off as it is
    alone = cut(20, 0.0, 0.0 if number else -40.0)
    honest = cut(16, 0.5, -0.5)
    # of the 32 bins the last 8 are beyond its bits
    narrow = replace(alone, left=np.full((3, 1), 255, np.uint8))

    def found(trees: Mapping[str, Trees]) -> float:
        bounds, rounds = list[tuple[float, float]](), runs * len(trees)
        with tempfile.TemporaryDirectory() as folder, drawing(seed):
            run = forest(2 * noise_for(1.0, DELTA), rounds, number=number)
            nodes = [
                Node(Path(folder) / str(k), row, run) for k, row in enumerate(odd_rows(number))
            ]
            try:
                for k, sent in enumerate(trees.values()):
                    seen: list[list[tuple[str, np.ndarray | None]]] = [[], []]
                    for t in range(k * runs, (k + 1) * runs):
                        for node, world in zip(nodes, seen, strict=True):
                            news = {
                                "layout": None,
                                "first": node.count,
                                "trees": steps.trees_tree(sent),
                            }
                            first = node.asked("begin", t, news)
                            told = node.asked("sums", t, {"t": t, "trees": steps.trees_tree(alone)})
                            world.append((f"{first[0]} {told[0]}", told[1]))
                    bounds += [separated(*scores) for scores in _classifiers(seen, runs // 2)]
            finally:
                for node in nodes:
                    node.close()
        return max(bounds)[1]

    crafted = {"honest": honest, "alone": alone, "narrow": narrow}
    with changed((Trees, "problem", lambda *_: "")):
        broken = {"without the check of trees": found({"narrow": narrow})}
    if number:
        whole = lambda scores, y, bits, most: residuals(scores, y, bits, fedextra.FARTHEST)
        with changed((fedextra, "residuals", whole)):
            broken["residuals as they are"] = found({"alone": alone})
    name = "A1 sums of leaves" + " of a number" * number
    return Audit(name, 1.0, found(crafted), broken)


def odd_rows(number: bool) -> tuple[str, str]:
    """The row of each world, with classes or a number to predict."""
    return (USUAL.replace("one", "0.3"), ODD.replace("two", "-900")) if number else (USUAL, ODD)


# -- A2: one run -----------------------------------------------------------------------------------

AT_ONCE = 500
"""Canaries whose gradients are in memory at once."""


def audit_one_run(canaries: int, seed: int = 0, sigma: float = 2.0) -> Audit:
    """A2 of a step of DP-SGD: each canary's gradient has a coordinate of its own, far beyond the
    norm.
    """

    def found(part: float) -> float:
        rng = np.random.default_rng(seed)
        inside = rng.random(canaries) < 0.5
        with drawing(seed, part):
            each = clipped_rows(100.0 * torch.eye(AT_ONCE, dtype=torch.float64), 1.0)
            total = torch.cat(
                [
                    each[torch.from_numpy(some)].sum(0)
                    for some in np.split(inside, canaries // AT_ONCE)
                ]
            )
            blurred = Draws(None).blur(total, sigma, 1.0).numpy()
        order, bounds = np.argsort(-np.abs(blurred - 0.5)), []
        for guesses in (canaries // 50, canaries // 20, canaries // 8):
            some = order[:guesses]
            bounds.append(
                one_run_bound(
                    int(((blurred[some] > 0.5) == inside[some]).sum()),
                    guesses,
                    canaries,
                    1 - 0.05 / 3,
                )
            )
        return max(bounds)

    return Audit(
        "A2 DP-SGD",
        epsilon([Releases(sigma)], DELTA),
        found(1.0),
        {"half of the noise": found(0.5)},
    )


# -- A3: white box ---------------------------------------------------------------------------------


def _trained(sigma: float, who: str = "own") -> Any:
    """A party with DP-SGD whose noise is added by these."""
    with tempfile.TemporaryDirectory() as folder:
        Node(Path(folder) / "0", USUAL, config(1.0, 1, FORM)).close()
        own = OwnFile(DataOptions(keep=("a", "b"), test="part"))
        files = PrivateData(rows=Path(folder) / "0" / "own.csv", own=own)
        run = config(sigma, 1, FORM, who)
        return build_party(for_nodes(build(run, PrivateData())), 0, files, secret=7).party


def _craft(party: Any, size: float) -> None:
    """Let the first row of all have a gradient of this size along one coordinate, and the others
    none.
    """
    first, seen = next(iter(party.params)), party.data.x(torch.arange(1))

    def gradients(loss: Any, x: Tensor, y: Tensor, *, of: Any) -> dict[str, Tensor]:
        made = {name: torch.zeros(len(x), *party.params[name].shape) for name in of}
        if torch.equal(x[:1], seen):
            made[first].view(len(x), -1)[0, 0] = size
        return made

    object.__setattr__(party, "row_gradients", gradients)


def _crafted_steps(trials: int, steps: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of DP-SGD whose row 0 has a gradient of ± 100 C along one coordinate in each step: it
    was replaced.
    """
    party = _trained(sigma)
    names, which, scores = list(party.params), torch.arange(8), []
    for size in (-100.0, 100.0):
        _craft(party, size)
        draw = lambda: float(private.noisy_sum(party, Draws(None), names, which)[0])
        scores.append(np.array([sum(draw() for _ in range(steps)) for _ in range(trials)]))
    return scores[0], scores[1]


def _crafted_sum(trials: int, steps: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of secure sums with shares of noise, from as few nodes as open a sum of seven of whom
    one helps. The others' rows do not count, their shares of noise do.
    """
    party, scores = _trained(sigma, "shares"), []
    names, honest = list(party.params), threshold(7, 1) - 1
    nothing = torch.zeros(_count(party), dtype=torch.int64)
    share = lambda: fedsgd_dp.noisy_gradient(party, names, honest, t=0)[names[0]].view(-1)[0]
    for size in (0.0, 100.0):
        _craft(party, size)

        def total() -> float:
            own = share()
            with changed((fedsgd_dp, "rounded_sum", lambda *_: nothing)):
                return float(own + sum(share() for _ in range(honest - 1)))

        with changed((fedsgd_dp, "AT_ONCE", ROWS)):
            scores.append(np.array([sum(total() for _ in range(steps)) for _ in range(trials)]))
    return scores[0], scores[1]


def _count(party: Any) -> int:
    return sum(w.numel() for w in party.params.values())


def _crafted_leaves(
    trials: int, steps_: int, sigma: float, *, number: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of FedExtra, where a row that counts most is in a leaf alone, or is not: its class has
    the probability 0; or its number is far from the prediction, so that its clipped residual and
    the row are seen.
    """
    scores, run = [], forest(sigma, 1, number=number)
    along = torch.tensor([fedextra.CLIP, 1.0] if number else [1.0, 0.0], dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        for k, row in enumerate(odd_rows(number)):
            Node(Path(folder) / str(k), row, run).close()
            own = OwnFile(DataOptions(keep=("a", "b"), test="part"))
            files = PrivateData(rows=Path(folder) / str(k) / "own.csv", own=own)
            party: Any = build_party(for_nodes(build(run, PrivateData())), 0, files, secret=7).party
            party.begin(
                layout=None, first=0, trees=steps.trees_tree(cut(20, 0.0, 0.0 if number else -40.0))
            )
            alone = steps.trees_tree(cut(20, 0.0, 0.0))
            draw = lambda party=party, alone=alone: float(
                party.sums(t=0, trees=alone)["sums"][:, 2].double() @ along
            )
            scores.append(np.array([sum(draw() for _ in range(steps_)) for _ in range(trials)]))
    return scores[0], scores[1]


def _crafted_numbers(trials: int, steps_: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of FedExtra for a number: see `_crafted_leaves`."""
    return _crafted_leaves(trials, steps_, sigma, number=True)


def _crafted_mean(trials: int, steps: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of DP-FedAvg, where one client of four sends a huge change or counts as nothing."""
    how = Private(sigma, 1.0, lambda key: Draws(None))
    nothing = [{"w": torch.zeros(2)} for _ in range(3)]
    scores = [
        np.array(
            [
                sum(
                    float(how.combine([*nothing, {"w": torch.tensor([size, 0.0])}])["w"][0])
                    for _ in range(steps)
                )
                for _ in range(trials)
            ]
        )
        for size in (0.0, 1e6)
    ]
    return scores[0], scores[1]


def _crafted_embedding(trials: int, steps: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a mean embedding of 20 rows, of which one is replaced by the farthest
    one there is.
    """
    rows, far = torch.zeros(20, 1), torch.zeros(20, 1)
    far[0] = math.pi
    omega = torch.ones(4, 1, dtype=torch.float64)
    means = [kernel.mean_embedding(x, omega) for x in (rows, far)]
    along = means[1] - means[0]
    scores = [
        np.array(
            [
                sum(
                    float(kernel.private_mean(mean, 20, sigma, Draws(None)) @ along)
                    for _ in range(steps)
                )
                for _ in range(trials)
            ]
        )
        for mean in means
    ]
    return scores[0], scores[1]


def audit_look(runs: int, seed: int = 0) -> Audit:
    """A3 of a look: one test row is replaced, of which a crafted model is certain, or certain of
    the other class. Both numbers together have ε = 1, at δ = 0.
    """
    party, counts = _trained(1.0), float(ROWS - TRAINING)
    y = party.context.tests["own"].y(torch.arange(ROWS - TRAINING))
    logits = -3.0 * torch.nn.functional.one_hot(y, 2).float()
    worlds = []
    for odd in (30.0, -1e30):
        logits[0] = torch.where(torch.arange(2) == y[0], odd, -odd)
        with changed((type(party), "infer", lambda *_: logits)):
            loss = evaluation.predictions(party, on="own")["loss"].clamp(max=evaluation.MAX_LOSS)
            worlds.append((evaluation.score(party, on="own"), loss))

    def found(scores: Sequence[Mapping[str, Any]]) -> float:
        told = []
        for exact in scores:
            shown: list[Any] = [looks.blurred(exact, seed + 7, {"t": t}, {}) for t in range(runs)]
            told.append(
                np.array(
                    [float(x["loss"]) * counts / 10 - float(x["accuracy"]) * counts for x in shown]
                )
            )
        return separated(told[0], told[1])[1]

    exact = [score for score, _ in worlds]
    broken = {
        "losses clipped as a whole": found([{**score, "loss": loss} for score, loss in worlds])
    }
    with changed((looks, "SCALE", looks.SCALE / 3)):
        broken["a third of the noise"] = found(exact)
    return Audit("A3 look", 1.0, found(exact), broken)


Scores = Callable[[int, int, float], tuple[np.ndarray, np.ndarray]]
WHITE_BOX: dict[str, tuple[Scores, float]] = {
    "noise in the sum": (_crafted_sum, 1.0),
    "sums of leaves": (_crafted_leaves, 1.0),
    "sums of leaves of a number": (_crafted_numbers, 1.0),
    "DP-SGD": (_crafted_steps, 2.0),
    "DP-FedAvg": (_crafted_mean, 1.0),
    "mean embedding": (_crafted_embedding, 1.0),
}
"""Scores of both worlds, and the sensitivity in units of the noise multiplier's."""


WEAKER = {"half of the variance": 0.5**0.5, "half of the noise": 0.5}
"""Parts of the deviation of noise that an audit must notice."""


def audit_white_box(
    name: str, trials: int, seed: int = 0, steps: int = 3, *, short: bool = False
) -> Audit:
    """A3 of a claim, at the noise with which all steps together are one release with σ = 1. The
    `short` form leaves out half of the noise, which is easier to notice than half of its variance.
    """
    scores, sensitivity = WHITE_BOX[name]
    sigma = sensitivity * math.sqrt(steps)

    def found(part: float) -> float:
        with drawing(seed, part):
            return split_at(*scores(trials, steps, sigma))

    claim = epsilon([Releases(sigma / sensitivity, steps)], DELTA)
    if name == "noise in the sum":
        party = _trained(sigma, "shares")
        claim = epsilon([fedsgd_dp.release(party.cfg, _count(party), steps)], DELTA)
    broken = {what: found(part) for what, part in [*WEAKER.items()][: 1 if short else None]}
    return Audit(f"A3 {name}", claim, found(1.0), broken)


def main(scale: float = 1.0, seed: int = 0) -> int:
    """Print a line for each audit; the number of those that do not hold."""
    logging.disable()  # a node's log names each refused question
    runs, wrong = int(200 * scale), 0
    audits: list[Callable[[], Audit]] = [
        lambda: audit_node(runs, seed),
        lambda: audit_choice(runs, seed),
        lambda: audit_leaves(runs, seed),
        lambda: audit_leaves(runs, seed, number=True),
        lambda: audit_one_run(16_000, seed),
        lambda: audit_look(50 * runs, seed),
        *(lambda name=name: audit_white_box(name, 10 * runs, seed) for name in WHITE_BOX),
    ]
    print(
        "| attack, claim | claimed ε | found ε | found where something is reverted | "
        "|\n|---|---|---|---|---|"
    )
    for audit in audits:
        one = audit()
        wrong += not one.holds
        broken = ", ".join(f"{what}: {found:.2f}" for what, found in one.broken.items())
        print(
            f"| {one.name} | {one.claim:.2f} | {one.found:.2f} | {broken} | "
            f"{'' if one.holds else 'FAILS'} |",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main(float((sys.argv[1:2] or ["1"])[0]), int((sys.argv[2:3] or ["0"])[0])) > 0)
