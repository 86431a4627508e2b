"""How often a trial's decisions are right: simulated federations whose true gains are known.

    python -m benchmarks.decisions [--sets 40] [--seed 1] [--scores auc rmse] [--out FILE]

Each federation is drawn from one of fourteen designs. Linear models are trained in 3 repeats of 4 folds, as
`fedloom trial` does: alone on each owner's rows, on the rows of all owners, and the mean of both. The true gain of an
owner is that of the very models, on 20,000 fresh rows of its own; of a window of time, on those of that window. The
table counts decisions by true gain, for each design.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.experiment.trial.choice import best
from fedloom.experiment.trial.contributions import contributions, scores_of
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.evidence import evidence

REPEATS, FOLDS, WINDOWS, FRESH, WORTH = 3, 4, 10, 20_000, 0.01
BANDS = ((-np.inf, 0.0), (0.0, 0.01), (0.01, 0.03), (0.03, np.inf))
BAND_NAMES = ("≤ 0", "0 to .01", ".01 to .03", "≥ .03")
DECISIONS = ("join", "same", "alone", "undecided", "too few")


@dataclass(frozen=True, eq=False)
class Federation:
    """Owners of one simulated federation: a function that draws an owner's rows, and the owners' numbers of rows.

    `draw(i, n, rng)` gives x (n, d), the linear signal (n,) and the unit (n,) of the rows.
    """

    sizes: np.ndarray
    draw: Callable[[int, int, np.random.Generator], tuple[np.ndarray, np.ndarray, np.ndarray]]
    intercept: float = 0.0
    ordered: bool = False
    units: bool = False


def federation(design: str, rng: np.random.Generator) -> Federation:
    """A federation of this design."""
    owners, columns = int(rng.choice([2, 4, 6, 12, 20])), int(rng.choice([6, 15, 40]))
    if design == "many owners":
        owners = int(rng.choice([50, 100]))
    sizes = rng.integers(60, 200, owners)
    common = rng.normal(size=columns) * rng.choice([0.5, 1.0, 1.5]) / np.sqrt(columns)
    own, intercept = np.tile(common, (owners, 1)), 0.0
    if design == "few rows":
        sizes = rng.integers(16, 60, owners)
    elif design == "shifted":
        own = own + rng.normal(size=own.shape) * np.linalg.norm(common) * 0.7 / np.sqrt(columns)
    elif design == "unrelated":
        own = rng.normal(size=own.shape) * np.linalg.norm(common) / np.sqrt(columns)
    elif design == "one opposite":
        own[0] = -own[0]
    elif design == "one small":
        sizes = np.concatenate([[60], rng.integers(400, 1000, owners - 1)])
    elif design == "half small":
        sizes[: owners // 2] = rng.integers(20, 60, owners // 2)
        sizes[owners // 2 :] = rng.integers(200, 600, owners - owners // 2)
    elif design == "no signal":
        own = own * 0
    elif design == "imbalanced":
        intercept = 2.0
    elif design == "two groups":
        own[::2] = rng.normal(size=columns) * np.linalg.norm(common) / np.sqrt(columns)
    elif design == "plenty":
        sizes = rng.integers(500, 900, owners)

    def draw(i: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        unit = np.arange(n)
        if design == "units":  # patients with several rows that resemble each other, in columns and in labels
            unit = np.repeat(np.arange(n), rng.integers(1, 8, n))[:n]
            center = rng.normal(size=(n, columns + 1))[unit]
            x = (center[:, :columns] + rng.normal(size=(n, columns))) / np.sqrt(2)
            return x, x @ own[i] * 2 + center[:, -1], unit
        x = rng.normal(size=(n, columns))
        signal = x @ own[i] * 2
        if design == "time":  # a slow drift of the signal
            signal = signal + np.sin(np.linspace(0, 3, n) + i)
        return x, signal, unit

    return Federation(sizes, draw, intercept, design == "time", design == "units")


DESIGNS = (
    "alike", "few rows", "plenty", "shifted", "unrelated", "one opposite", "one small", "half small", "no signal",
    "imbalanced", "units", "time", "two groups", "many owners",
)  # fmt: skip


def labels(score: str, signal: np.ndarray, intercept: float, rng: np.random.Generator) -> np.ndarray:
    """Classes by the logistic model, or numbers with noise."""
    if score in ("rmse", "mae", "r2"):
        return signal + rng.normal(size=len(signal))
    return (rng.random(len(signal)) < 1 / (1 + np.exp(intercept - signal))).astype(np.int64)


def fit(score: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Ridge or logistic coefficients (d + 1,), by Newton's method; the penalty is 1."""
    z = np.column_stack([x, np.ones(len(x))])
    penalty = np.diag([1.0] * x.shape[1] + [1e-6])
    if score in ("rmse", "mae", "r2"):
        return np.linalg.solve(z.T @ z + penalty, z.T @ y)
    beta = np.zeros(z.shape[1])
    for _ in range(8):
        p = 1 / (1 + np.exp(-np.clip(z @ beta, -30, 30)))
        weight = np.maximum(p * (1 - p), 1e-4)
        beta = beta + np.linalg.solve((z.T * weight) @ z + penalty, z.T @ (y - p) - penalty @ beta)
    return beta


def predict(score: str, x: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Numbers (n,), or probabilities (n, 2)."""
    line = x @ beta[:-1] + beta[-1]
    if score in ("rmse", "mae", "r2"):
        return line
    p = 1 / (1 + np.exp(-np.clip(line, -30, 30)))
    return np.stack([1 - p, p], axis=1)


def folds_of(world: Federation, y: np.ndarray, unit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(n,) folds: by unit, or stratified by class."""
    if world.units:
        names = np.unique(unit)
        return (rng.permutation(len(names)) % FOLDS)[np.searchsorted(names, unit)]
    order = rng.permutation(len(y))
    if y.dtype.kind == "i":
        order = order[np.argsort(y[order], kind="stable")]
    folds = np.zeros(len(y), np.int64)
    folds[order] = (np.arange(len(y)) + rng.integers(FOLDS)) % FOLDS
    return folds


def choices(score: str, y: list[np.ndarray], first: list[np.ndarray], folds: list[np.ndarray]) -> np.ndarray:
    """(C, K) numbers of candidates, as a trial chooses them: by predictions (M, n_i, ...) of the first repeat for each
    owner, of rows that are not in the fold."""
    repeats, parts = len(folds[0]), int(max(each.max() for each in folds)) + 1
    scores = np.full((len(first[0]), repeats, parts, parts, len(y)), np.nan)
    for i, fold in enumerate(folds):
        for c, k, f in np.ndindex(repeats, parts, parts):
            rows = (fold[0] == f) & (fold[c] != k)
            if rows.any():
                scores[:, c, k, f, i] = scores_of(score, y[i][rows], first[i][:, rows])
    return best(scores, np.array([float(len(each)) for each in y]))


def simulate(design: str, score: str, seed: int) -> list[tuple[str, float, float, float, float]]:
    """Decision, true gain, estimate and interval of each owner of one federation."""
    rng = np.random.default_rng([seed, DESIGNS.index(design)])
    world = federation(design, rng)
    rows, fresh = [], []
    for i, n in enumerate(world.sizes):
        x, signal, unit = world.draw(i, int(n), rng)
        rows.append((x, labels(score, signal, world.intercept, rng), unit))
        x, signal, _ = world.draw(i, FRESH, rng)
        fresh.append((x, labels(score, signal, world.intercept, rng)))
    repeats, parts_of = (1, WINDOWS) if world.ordered else (REPEATS, FOLDS)
    owners = len(rows)
    shape = (2, repeats, parts_of, owners)  # federated candidates: all rows, and the mean with training alone
    truth = np.zeros(shape)
    truth_alone = np.zeros(shape[1:])
    folds = [np.zeros((repeats, len(y)), np.int64) for _, y, _ in rows]
    empty = [np.zeros((repeats, *predict(score, x, np.zeros(x.shape[1] + 1)).shape)) for x, _, _ in rows]
    alone, shared = empty, [np.stack([e, e]) for e in empty]
    windows = [np.arange(len(y)) * 2 * WINDOWS // len(y) - WINDOWS for _, y, _ in rows]  # the later half
    fresh_windows = np.arange(FRESH) * 2 * WINDOWS // FRESH - WINDOWS
    for c in range(repeats):
        for i, (_, y, unit) in enumerate(rows):
            folds[i][c] = windows[i] if world.ordered else folds_of(world, y, unit, rng)
        for k in range(parts_of):
            train = [f[c] < k if world.ordered else f[c] != k for f in folds]
            everyone = fit(
                score,
                np.concatenate([x[t] for (x, _, _), t in zip(rows, train, strict=True)]),
                np.concatenate([y[t] for (_, y, _), t in zip(rows, train, strict=True)]),
            )
            for i, (x, y, _) in enumerate(rows):
                test = folds[i][c] == k
                own = fit(score, x[train[i]], y[train[i]])
                late = fresh_windows == k if world.ordered else slice(None)
                fresh_x, fresh_y = fresh[i][0][late], fresh[i][1][late]
                parts = [[predict(score, z, beta) for beta in (own, everyone)] for z in (x[test], fresh_x)]
                alone[i][c, test] = parts[0][0]
                truth_alone[c, k, i] = contributions(score, fresh_y, parts[1][0], np.zeros(len(fresh_y)))[0]
                for m, mix in enumerate((0.0, 0.5)):
                    shared[i][m, c, test] = mix * parts[0][0] + (1 - mix) * parts[0][1]
                    mixed = mix * parts[1][0] + (1 - mix) * parts[1][1]
                    truth[m, c, k, i] = contributions(score, fresh_y, mixed, np.zeros(len(fresh_y)))[0]
    root = score == "rmse"  # of the mean over all models, as the score is of the rows of all folds
    if root:
        truth, truth_alone = np.square(truth), np.square(truth_alone)
    chosen = choices(score, [y for _, y, _ in rows], [one[:, 0] for one in shared], folds)
    found, gains = [], []
    for i, (_, y, unit) in enumerate(rows):
        scored = folds[i][0] >= 0
        federated = np.zeros_like(alone[i])
        true, true_alone = 0.0, truth_alone[:, :, i].mean()
        for c in range(repeats):
            for k in range(parts_of):
                test = folds[i][c] == k
                federated[c, test] = shared[i][chosen[c, k], c, test]
                true += truth[chosen[c, k], c, k, i] / repeats / parts_of
        if root:
            true, true_alone = -np.sqrt(true), -np.sqrt(true_alone)
        gains.append(1 - true / true_alone if score in ("rmse", "mae") else true - true_alone)
        unit = folds[i][0] if world.ordered else unit
        found.append(
            evidence(
                score, y[scored], alone[i][:, scored], federated[:, scored], folds[i][:, scored],
                unit=unit[scored] if world.units or world.ordered else None,
            )
        )  # fmt: skip
    verdicts = decide(found, WORTH)
    return [(v.decision, float(g), v.gain, v.low, v.high) for v, g in zip(verdicts, gains, strict=True)]


def table(results: dict[str, list[tuple[str, float, float, float, float]]]) -> str:
    """Decisions by true gain, for each design and for all."""
    lines = [
        "| design | owners | coverage | join by true gain: " + ", ".join(BAND_NAMES) + " | joins with gain ≤ 0 | alone "
        "with gain ≥ .01 | same, by true gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in [*results.items(), ("all", [one for each in results.values() for one in each])]:
        true = np.array([one[1] for one in found])
        decision = np.array([one[0] for one in found])
        known = np.array([np.isfinite(one[2]) for one in found])
        inside = np.array([one[3] <= one[1] <= one[4] for one in found])[known].mean()
        bands = [(true > low) & (true <= high) for low, high in BANDS]
        joined, same = (
            " ".join(f"{(decision[band] == kind).mean():.3f}" if band.any() else "–" for band in bands)
            for kind in ("join", "same")
        )
        joins, large = decision == "join", true >= WORTH
        lines.append(
            f"| {name} | {len(found)} | {inside:.3f} | {joined} | {(joins & (true <= 0)).sum()} of "
            f"{joins.sum()} | {((decision == 'alone') & large).sum()} of {large.sum()} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=40, help="federations of each design")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scores", nargs="+", default=["auc", "rmse"])
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--out", type=Path, help="a JSON file for the decisions")
    args = parser.parse_args()
    kept = {}
    for score in args.scores:
        results = defaultdict(list)
        for design in args.designs:
            for n in range(args.sets):
                results[design] += simulate(design, score, args.seed * 100_003 + n)
        print(f"\n{score}, {args.sets} federations of each design, seed {args.seed}\n\n{table(results)}", flush=True)
        kept[score] = results
    if args.out:
        args.out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
