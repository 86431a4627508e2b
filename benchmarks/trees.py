"""CPU seconds and AUC of federated trees against scikit-learn's, on one thread: `python -m
benchmarks.trees adult`.

Rows are split evenly over the owners. The agreement on bins is not counted, while the others'
binning is. LightGBM and XGBoost are added if they are installed. The ratio is to the seconds of
scikit-learn with as many leaves (31 for depth 5), which are taken before and after fedloom's, as
other work on the machine slows both. Of three runs of each the one with the median ratio is shown.
With `fast` are the compiled loops of the extra, if it is installed, once they are loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

from fedloom.core.federation import Federation
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.trees import compiled, histograms

ROUNDS = 100
RUNS = 3
SETTINGS = ((1, 32, 5), (1, 64, 5), (10, 64, 5), (1, 255, 5), (1, 64, 6))
"""Owners, bins and depth."""


def plan_of(name: str, owners: int, bins: int, depth: int) -> RunPlan:
    """A run of FedBoost on a data set."""
    data = {
        "name": name,
        "clients": owners,
        "partition": "iid",
        "public_rows": 0,
        "test_fraction": 0.2,
    }
    return build(
        check(
            {"run": {"method": "fedboost", "data": data, "params": {"bins": bins, "depth": depth}}}
        ).run
    )


def score(y: np.ndarray, p: np.ndarray) -> float:
    """AUC in percent, or accuracy for more than two classes."""
    return 100 * float(
        roc_auc_score(y, p[:, 1]) if p.shape[1] == 2 else accuracy_score(y, p.argmax(1))
    )


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def fitted(make: Callable[[], Any], x: np.ndarray, y: np.ndarray) -> tuple[float, Any]:
    """CPU seconds, and the model."""
    model = make()
    return timed(lambda: model.fit(x, y)), model


def fedloom(plan: RunPlan) -> tuple[float, np.ndarray]:
    """CPU seconds of all rounds but the agreement, and probabilities of the test rows."""
    with start(plan) as engine:
        fed = Federation(engine)

        def run(t: int) -> None:
            fed.round = t
            for _ in plan.method.round(fed, plan.server, list(engine.ids), plan.cfg, t):
                pass

        run(0)
        seconds = timed(lambda: [run(t) for t in range(1, ROUNDS + 1)])
        party = engine._parties[0]  # type: ignore[attr-defined]
        return seconds, party.infer(plan.contexts[0].tests["test"].every).softmax(-1).numpy()


def ran(name: str, owners: int, bins: int, depth: int) -> tuple[float, np.ndarray]:
    """As `fedloom`, of a new run."""
    return fedloom(plan_of(name, owners, bins, depth))


def rivals(
    words: Sequence[Sequence[str]], leaves: int = 31
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other libraries, on one thread; scikit-learn's trees have this many leaves, LightGBM's 31,
    XGBoost's depth 5.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    yield (
        "scikit-learn",
        lambda: HistGradientBoostingClassifier(
            max_iter=ROUNDS,
            learning_rate=0.1,
            l2_regularization=1,
            max_leaf_nodes=leaves,
            early_stopping=False,
            categorical_features=[f for f, size in enumerate(words) if size] or None,
        ),
    )
    try:
        import lightgbm
    except ImportError:
        pass
    else:
        yield (
            "LightGBM",
            lambda: lightgbm.LGBMClassifier(
                n_estimators=ROUNDS, reg_lambda=1, n_jobs=1, verbose=-1
            ),
        )
    try:
        import xgboost
    except ImportError:
        pass
    else:
        yield (
            "XGBoost",
            lambda: xgboost.XGBClassifier(
                n_estimators=ROUNDS, learning_rate=0.1, max_depth=5, n_jobs=1, tree_method="hist"
            ),
        )


def median(
    work: Callable[[], tuple[float, Any]], sklearn: Callable[[], tuple[float, Any]]
) -> tuple[float, float, Any]:
    """CPU seconds, their ratio to scikit-learn's, and the result, of the run with the
    median ratio.
    """
    found = []
    for _ in range(RUNS):
        before = sklearn()[0]
        seconds, result = work()
        found.append((seconds, 2 * seconds / (before + sklearn()[0]), result))
    return sorted(found, key=lambda each: each[1])[RUNS // 2]


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ["breast_cancer"]:
        plan = plan_of(name, 1, 64, 5)
        rows, test = plan.contexts[0].rows, plan.contexts[0].tests["test"]
        x, y = rows.every.numpy(), rows.labels[rows.index].numpy()
        new, truth = test.every.numpy(), test.labels[test.index].numpy()
        print(f"{name}: {len(y)} rows, {x.shape[1]} columns", flush=True)
        libraries = dict(rivals(plan.contexts[0].words))
        sklearn = partial(fitted, libraries["scikit-learn"], x, y)
        sklearn()  # the first fit compiles
        settings = [(owners, bins, depth, False) for owners, bins, depth in SETTINGS]
        if compiled.INSTALLED:
            settings += [(1, 64, 5, True), (10, 64, 5, True)]
        for owners, bins, depth, fast in settings:
            histograms.MANY = 0 if fast else 1 << 62  # type: ignore[misc]
            if fast:
                ran(name, owners, bins, depth)  # loads the loops
            as_many = partial(
                fitted, dict(rivals(plan.contexts[0].words, 2**depth - 1))["scikit-learn"], x, y
            )
            seconds, ratio, p = median(partial(ran, name, owners, bins, depth), as_many)
            label = f"{owners} owners, {bins} bins, depth {depth}{', fast' * fast}"
            print(
                f"  fedloom, {label:34} {seconds:6.2f} s  {ratio:4.1f}  {score(truth, p):.2f}",
                flush=True,
            )
        for library, make in libraries.items():
            seconds, ratio, model = median(partial(fitted, make, x, y), sklearn)
            found = score(truth, model.predict_proba(new))
            print(f"  {library:43} {seconds:6.2f} s  {ratio:4.1f}  {found:.2f}", flush=True)


if __name__ == "__main__":
    main()
