"""How often a trial's decisions are right: simulated federations whose true gains are known.

    python -m benchmarks.decisions [--sets 40] [--seed 1] [--scores auc rmse] [--out FILE.jsonl]
    [--advice] python -m benchmarks.decisions --table FILE.jsonl...    # merges archives, and says which goals are met

Each federation is drawn from one of fifteen designs, with 2, 4, 6, 12 and 20 owners in turn. Linear
models are trained in up to 3 repeats of 4 folds, as `fedloom trial` does: alone on each owner's
rows, on the rows of all owners, and the mean of all owners' models; the latter two also mixed with
the own model, half and half, and by weights of the owners. The true gain of an owner is that of the
very models, expected on 10 fresh rows for each of its own whose probabilities of the classes, or
mean numbers, are known; of a window of time, on those of that window. So labels add no noise to it,
and without a signal all areas under the curve are 0.5 exactly. The table counts decisions by true
gain, for each design.

Beside the owners that join stands how many could, of those whose true gain is 0.03 or more: the
power of tests on the 2.5 % level that know each standard error s. By own rows P(z > 1.96 - g / s),
as no rule has that joins as seldom where this owner gains nothing. By all rows P(z > 1.96 - |g /
s|) with all owners' gains in one vector, as no rule has that joins as seldom where nobody gains
anything (J. Neyman, E. S. Pearson, 1933); with two owners, by own rows.

A rate is shown with the upper limit of its exact 95 % interval (C. J. Clopper, E. S. Pearson,
1934): a goal is met if the limit is within it, and otherwise met so far if the rate is. Owners of
one federation are not independent.
"""  # noqa: E501

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.decision_goals import Outcome, goals, line_of, read, table
from fedloom.experiment.trial.choice import WEIGHTS, best, gains_of_weights, personal
from fedloom.experiment.trial.contributions import LEAST_PROBABILITY, scores_of
from fedloom.experiment.trial.decide import SHARING, decide, worth_repeating
from fedloom.experiment.trial.evidence import Evidence, evidence, standard_errors
from fedloom.experiment.trial.folds import BLOCKS
from fedloom.experiment.trial.folds import windows as count_windows
from fedloom.experiment.trial.run import FEWEST_REPEATS

REPEATS, FOLDS, WORTH, ALPHA = 3, 4, 0.01, 0.025
FRESH, LEAST_FRESH = 10, 2_000
"""Fresh rows for each row of an owner, so that its true gain has less than a tenth of the
estimate's variance; at least.
"""
OWNERS, MANY_OWNERS = (2, 4, 6, 12, 20), (50, 100)
MOST_ROWS = 2_000
"""Of an owner that is simulated again with more rows."""


@dataclass(frozen=True, eq=False)
class Federation:
    """Owners of one simulated federation: a function that draws an owner's rows, and the owners'
    numbers of rows.

    `draw(i, n, rng)` gives x (n, d), the linear signal (n,) and the unit (n,) of the rows.
    """

    sizes: np.ndarray
    draw: Callable[[int, int, np.random.Generator], tuple[np.ndarray, np.ndarray, np.ndarray]]
    intercept: float = 0.0
    ordered: bool = False
    units: bool = False


def federation(design: str, owners: int, rng: np.random.Generator) -> Federation:
    """A federation of this design, of so many owners."""
    columns = int(rng.choice([6, 15, 40]))
    sizes = rng.integers(60, 200, owners)
    common = rng.normal(size=columns) * rng.choice([0.5, 1.0, 1.5]) / np.sqrt(columns)
    own, intercept = np.tile(common, (owners, 1)), 0.0
    if design == "few rows":
        sizes = rng.integers(16, 60, owners)
    elif design in ("shifted", "same days"):
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

    days = int(sizes.max())
    weather = rng.normal(size=(days, columns + 1)) if design == "same days" else np.zeros((0, 0))

    def draw(i: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        unit = np.arange(n)
        # patients with several rows that resemble each other, in columns and in labels
        if design == "units":
            unit = np.repeat(np.arange(n), rng.integers(1, 8, n))[:n]
            center = rng.normal(size=(n, columns + 1))[unit]
            x = (center[:, :columns] + rng.normal(size=(n, columns))) / np.sqrt(2)
            return x, x @ own[i] * 2 + center[:, -1], unit
        x = rng.normal(size=(n, columns))
        # of all owners, but for fresh rows: half of the columns' variance, and a shock
        if design == "same days":
            day = (
                weather[np.arange(n) * days // n]
                if n <= days
                else rng.normal(size=(n, columns + 1))
            )
            x = (x + day[:, :columns]) / np.sqrt(2)
            return x, x @ own[i] * 2 + 2 * day[:, -1], unit
        signal = x @ own[i] * 2
        if design == "time":  # a slow drift of the signal
            signal = signal + np.sin(np.linspace(0, 3, n) + i)
        return x, signal, unit

    return Federation(sizes, draw, intercept, design in ("time", "same days"), design == "units")


DESIGNS = (
    "alike",
    "few rows",
    "plenty",
    "shifted",
    "unrelated",
    "one opposite",
    "one small",
    "half small",
    "no signal",
    "imbalanced",
    "units",
    "time",
    "two groups",
    "many owners",
    "same days",
)


def labels(
    score: str, signal: np.ndarray, intercept: float, rng: np.random.Generator
) -> np.ndarray:
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


def expected(score: str, signal: np.ndarray, intercept: float, predicted: np.ndarray) -> np.ndarray:
    """The scores (M,) of predictions (M, n, ...), expected over the labels of rows with this linear
    signal (n,): see `labels`.
    """
    if score in ("rmse", "mae", "r2"):
        off = predicted - signal  # the noise is normal with variance 1
        if score == "mae":
            folded = np.sqrt(2 / np.pi) * np.exp(-np.square(off) / 2) + off * (
                1 - 2 * stats.norm.sf(off)
            )
            return -folded.mean(1)
        squared = np.square(off).mean(1) + 1
        return -np.sqrt(squared) if score == "rmse" else 1 - squared / (signal.var() + 1)
    p = 1 / (1 + np.exp(intercept - signal))
    if score == "auc":
        return np.array([_area(p, one[:, 1]) for one in predicted])
    chosen = predicted[:, :, 1] > 0.5
    if score == "accuracy":
        return np.where(chosen, p, 1 - p).mean(1)
    if score == "balanced accuracy":
        return (chosen @ p / p.sum() + ~chosen @ (1 - p) / (1 - p).sum()) / 2
    if score == "brier":
        return -2 * (
            p * np.square(1 - predicted[:, :, 1]) + (1 - p) * np.square(predicted[:, :, 1])
        ).mean(1)
    log = np.log(np.clip(predicted, LEAST_PROBABILITY, 1.0))
    return (p * log[:, :, 1] + (1 - p) * log[:, :, 0]).mean(1)


def _area(p: np.ndarray, values: np.ndarray) -> float:
    """The expected area under the curve of values (n,) of rows that are positive with probability p
    (n,): over pairs of two rows, the share of p_i (1 - p_j) where row i has the higher value; ties
    count half.
    """
    order = np.argsort(values)
    ordered, before = values[order], np.concatenate([[0.0], np.cumsum(1 - p[order])])
    below = (
        before[np.searchsorted(ordered, values, "left")]
        + before[np.searchsorted(ordered, values, "right")]
    )
    pairs = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()
    return float((p @ (below - (1 - p))) / (2 * pairs))


def predict(score: str, x: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Numbers (n,), or probabilities (n, 2)."""
    line = x @ beta[:-1] + beta[-1]
    if score in ("rmse", "mae", "r2"):
        return line
    p = 1 / (1 + np.exp(-np.clip(line, -30, 30)))
    return np.stack([1 - p, p], axis=1)


def folds_of(
    world: Federation, y: np.ndarray, unit: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
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


def simulate(design: str, score: str, seed: int, number: int) -> list[Outcome]:
    """The outcome of each owner of federation `number` of a design."""
    return outcomes(*evidence_of(design, score, seed, number))


def outcomes(
    found: list[list[Evidence]], truth: list[np.ndarray], mixed: np.ndarray
) -> list[Outcome]:
    """The outcome of each owner: see `evidence_of` for the arguments."""
    done = min(FEWEST_REPEATS, len(found))
    while True:
        verdicts = decide(found[done - 1], WORTH)
        if done == len(found) or not worth_repeating(found[done - 1], verdicts, WORTH):
            break
        done += 1
    true = truth[done - 1]
    own, together = powers(found[done - 1], true)
    known = [
        true.tolist(),
        own.tolist(),
        together.tolist(),
        mixed.tolist(),
        [one.p_gain for one in verdicts],
    ]
    return [
        Outcome(v.decision, v.gain, v.low, v.high, *rest)
        for v, *rest in zip(verdicts, *known, strict=True)
    ]


def advised(design: str, score: str, seed: int, number: int) -> list[bool]:
    """Whether two undecided owners of a federation, at most, are decided with as many rows as they
    were told.
    """
    found = evidence_of(design, score, seed, number)[0][FEWEST_REPEATS - 1]
    told = [
        (i, one.more_rows)
        for i, one in enumerate(decide(found, WORTH))
        if one.decision == "undecided" and one.more_rows is not None and one.more_rows <= MOST_ROWS
    ]
    again = [
        evidence_of(design, score, seed, number, rows_of)[0][FEWEST_REPEATS - 1]
        for rows_of in told[:2]
    ]
    return [
        decide(then, WORTH)[i].decision != "undecided"
        for then, (i, _) in zip(again, told, strict=False)
    ]


def powers(found: list[Evidence], true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The power (N,) of the best tests of no gain by own rows, and by those of all owners: see the
    module.
    """
    told = np.array([np.isfinite(one.gain) for one in found])
    known = np.where(told, true, 0.0)
    known[told] /= standard_errors([one for one, use in zip(found, told, strict=True) if use])[0]
    least = stats.norm.isf(ALPHA)
    own: np.ndarray = stats.norm.sf(least - known)
    if told.sum() < SHARING:
        return own, own
    return own, np.full(len(found), stats.norm.sf(least - np.linalg.norm(known)))


def evidence_of(
    design: str, score: str, seed: int, number: int, rows_of: tuple[int, int] | None = None
) -> tuple[list[list[Evidence]], list[np.ndarray], np.ndarray]:
    """After each repeat the evidence of each owner of one federation, and the true gains (N,); and
    those of the model of all rows with a weight for each owner, in the first repeat. `rows_of` has
    the number of an owner, and rows that it has in place of those of the design.
    """
    rng = np.random.default_rng([seed, DESIGNS.index(design), number])
    numbers = MANY_OWNERS if design == "many owners" else OWNERS
    world = federation(design, numbers[number % len(numbers)], rng)
    if rows_of is not None:
        world.sizes[rows_of[0]] = rows_of[1]
    rows, fresh = [], []
    for i, n in enumerate(world.sizes):
        x, signal, unit = world.draw(i, int(n), rng)
        rows.append((x, labels(score, signal, world.intercept, rng), unit))
        fresh.append(world.draw(i, max(FRESH * int(n), LEAST_FRESH), rng)[:2])
    repeats, K = (REPEATS, FOLDS)
    if world.ordered:
        repeats, K = 1, count_windows(float(np.median(world.sizes)), int(world.sizes.max()))
    owners = range(len(rows))
    folds = [np.zeros((repeats, len(y)), np.int64) for _, y, _ in rows]
    # of each owner's rows (3, C, n, ...): alone, by the model of all rows, by the mean of all
    # owners' models
    shown = [
        np.zeros((3, repeats, *predict(score, x, np.zeros(x.shape[1] + 1)).shape))
        for x, _, _ in rows
    ]
    # (c, k, i): the same of fresh rows
    new: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    windows = [np.arange(len(y)) * 2 * K // len(y) - K for _, y, _ in rows]  # the later half
    fresh_windows = [np.arange(len(y)) * 2 * K // len(y) - K for _, y in fresh]
    for c in range(repeats):
        for i, (_, y, unit) in enumerate(rows):
            folds[i][c] = windows[i] if world.ordered else folds_of(world, y, unit, rng)
        for k in range(K):
            train = [f[c] < k if world.ordered else f[c] != k for f in folds]
            parts = [(x[t], y[t]) for (x, y, _), t in zip(rows, train, strict=True)]
            everyone = fit(
                score, np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
            )
            own = [fit(score, x, y) for x, y in parts]
            for i, (x, _, _) in enumerate(rows):
                test = folds[i][c] == k
                late = fresh_windows[i] == k if world.ordered else slice(None)
                for z, into in ((x[test], None), (fresh[i][0][late], new)):
                    of_all = sum(predict(score, z, beta) for beta in own) / len(own)
                    three = np.stack(
                        [predict(score, z, own[i]), predict(score, z, everyone), of_all]
                    )
                    if into is None:
                        shown[i][:, c, test] = three
                    else:
                        into[c, k, i] = three, fresh[i][1][late]
    # weights (2, C, 3, K, N) of own models for both joint models: none, one half, and those that
    # `personal` chooses
    weights = np.zeros((2, repeats, 3, K, len(rows)))
    weights[:, :, 1] = 0.5
    for m, c in np.ndindex(2, repeats):
        gains, spread, units = (
            *np.zeros((2, len(WEIGHTS) - 1, K, len(rows))),
            np.zeros((K, len(rows))),
        )
        for i, (_, y, unit) in enumerate(rows):
            for k in range(K):
                of = (folds[i][c] != k) & (folds[i][0] >= 0)
                own = shown[i][0, 0, of]
                joint = shown[i][1 + m, 0, of]
                unit_of = unit[of] if world.units else None
                found = gains_of_weights(score, y[of], own, joint, folds[i][0, of], unit=unit_of)
                gains[:, k, i], spread[:, k, i], units[k, i] = found
        weights[m, c, 2] = personal(gains, spread, units)

    def mixed(three: np.ndarray, m: int, w: float) -> np.ndarray:
        """The prediction by joint model m and a weight of the own one."""
        return (1 - w) * three[1 + m] + w * three[0]

    # scores (2 * 3, C, K, folds, N) of candidates in the first repeat, as a trial chooses: on rows
    # outside of the fold
    scores = np.full((6, repeats, K, K, len(rows)), np.nan)
    for i, (_, y, _) in enumerate(rows):
        first = np.zeros((6, *shown[i][0, 0].shape))
        for k in range(K):
            at = folds[i][0] == k
            for n, (m, mode) in enumerate(np.ndindex(2, 3)):
                first[n, at] = mixed(shown[i][:, 0, at], m, weights[m, 0, mode, k, i])
        for c, k, f in np.ndindex(repeats, K, K):
            kept = (folds[i][0] == f) & (folds[i][c] != k)
            if kept.any():
                scores[:, c, k, f, i] = scores_of(score, y[kept], first[:, kept])
    chosen = best(scores, np.array([float(len(y)) for _, y, _ in rows]))
    root = score == "rmse"  # of the mean over all models, as the score is of the rows of all folds
    federated = [np.zeros_like(each[0]) for each in shown]
    truth = np.zeros((3, repeats, K, len(rows)))
    for c, k in np.ndindex(repeats, K):
        m, mode = divmod(int(chosen[c, k]), 3)
        for i in owners:
            at, w = folds[i][c] == k, weights[m, c, mode, k, i]
            federated[i][c, at] = mixed(shown[i][:, c, at], m, w)
            three, signal = new[c, k, i]
            judged = np.stack(
                [three[0], mixed(three, m, w), mixed(three, 0, weights[0, c, 2, k, i])]
            )
            values = expected(score, signal, world.intercept, judged)
            truth[:, c, k, i] = values**2 if root else values

    def gained(side: int, repeats: int) -> np.ndarray:
        """The true gain (N,) in the first repeats."""
        alone, joined = truth[[0, side], :repeats].mean((1, 2))
        if root:
            alone, joined = -np.sqrt(alone), -np.sqrt(joined)
        found: np.ndarray = 1 - joined / alone if score in ("rmse", "mae") else joined - alone
        return found

    evidences: list[list[Evidence]] = []
    true_gains: list[np.ndarray] = []
    for done in range(1, repeats + 1):
        true_gains.append(gained(1, done))
        each = []
        for i, (_, y, unit) in enumerate(rows):
            use, unit = folds[i][0] >= 0, folds[i][0] if world.ordered else unit
            each.append(
                evidence(
                    score,
                    y[use],
                    shown[i][0][:done][:, use],
                    federated[i][:done][:, use],
                    folds[i][:done][:, use],
                    unit=unit[use] if world.units or world.ordered else None,
                    together=(np.arange(len(y)) * 2 * BLOCKS // len(y))[use]
                    if world.ordered
                    else None,
                )
            )
        evidences.append(each)
    return evidences, true_gains, gained(2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=40, help="federations of each design")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scores", nargs="+", default=["auc", "rmse"])
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument(
        "--out", type=Path, help="an archive to which each federation is added that it lacks"
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        help="only: the tables of the federations of these archives",
    )
    parser.add_argument(
        "--advice",
        action="store_true",
        help="only: do the rows that undecided owners are told decide?",
    )
    args = parser.parse_args()
    if args.advice:
        for score in args.scores:
            right = [
                one
                for of in args.designs
                for n in range(args.sets)
                for one in advised(of, score, args.seed, n)
            ]
            print(
                f"{score}: {sum(right)} of {len(right)} owners are decided with the rows that "
                "they are told"
            )
        return
    known = read(args.table or ([args.out] if args.out else []))
    for score in () if args.table else args.scores:
        for design in args.designs:
            for n in range(args.sets):
                key = (score, design, args.seed, n)
                if key in known:
                    continue
                known[key] = simulate(design, score, args.seed, n)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(line_of(key, known[key]))
    for score in dict.fromkeys(key[0] for key in known):
        found = {key: outcomes for key, outcomes in known.items() if key[0] == score}
        seeds = ", ".join(str(seed) for seed in sorted({key[2] for key in found}))
        print(
            f"\n{score}, {len(found)} federations, seeds "
            f"{seeds}\n\n{table(found)}\n\n{goals(found)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
