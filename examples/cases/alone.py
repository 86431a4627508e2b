"""Trees that the first party of a vertical case trains alone, on its own columns of the aligned rows.

    python examples/cases/alone.py examples/cases/adult.toml

Accuracy and AUC times 100 on the test rows of each seed of the case, and their means. Nothing is searched.
"""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

from fedloom.core.scores import auc
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check

MODELS: dict[str, Callable[[int], Any]] = {
    "random forest": lambda seed: RandomForestClassifier(500, min_samples_leaf=3, random_state=seed),
    "boosting": lambda seed: HistGradientBoostingClassifier(max_iter=100, min_samples_leaf=10, random_state=seed),
}


def main() -> None:
    """Print a table."""
    content = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    compare = content.pop("compare")
    settings = {
        "title": content.pop("title"),
        "run": content,
        "compare": {**compare, "methods": compare["methods"][:1]},
    }
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    for run in check(settings).runs():
        data = build(run).data.parties
        assert data is not None, "the case has no parties with columns"
        own = data.views[0]
        for name, model in MODELS.items():
            p = model(run.seed).fit(own.x[own.aligned], data.labels).predict_proba(own.x[own.test])
            right = (p.argmax(1) == data.test_labels).mean()
            scores[name].append((100 * right, 100 * auc(data.test_labels, p)))
    print("| first party alone | accuracy | AUC | AUC by seed |\n|---|---|---|---|")
    for name, each in scores.items():
        mean = np.mean(each, 0)
        print(f"| {name} | {mean[0]:.1f} | {mean[1]:.1f} | {', '.join(f'{area:.1f}' for _, area in each)} |")


if __name__ == "__main__":
    main()
