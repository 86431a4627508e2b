"""AUC where each hospital lacks four of the thirteen columns, drawn at random, beside AUC with all
columns.

python examples/cases/hidden.py heart.csv 8           # the file of docs/cases/heart.md, and the number of seeds
python examples/cases/hidden.py heart.csv 8 pooled    # scikit-learn's models of all rows in one place; a minute
python examples/cases/hidden.py heart.csv 8 visible   # what the hidden columns alone cost; half a minute
"""  # noqa: E501

import sys
from typing import Any

import numpy as np
import pandas
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

import fedloom

METHODS: dict[str, dict[str, Any]] = {
    "fedforest": {"rounds": 5},
    "fedboost": {"rounds": 100, "params": {"depth": 3, "min_rows": 5, "bins": 32}},
    "fedavg-ft": {
        "rounds": 30,
        "models": "mlp",
        "params": {"batch_size": 32, "clients_per_round": "none"},
    },
}


def hidden(table: pandas.DataFrame, seed: int) -> pandas.DataFrame:
    """The table without four columns at each hospital."""
    rng, out = np.random.default_rng([7, seed]), table.copy()
    columns = [name for name in table if name not in ("hospital", "disease")]
    for site in sorted(table["hospital"].unique()):
        out.loc[out["hospital"] == site, list(rng.choice(columns, 4, replace=False))] = np.nan
    return out


def pooled(table: pandas.DataFrame, seed: int) -> list[float]:
    """AUC on a quarter of the rows: a forest and boosting that route gaps, and a forest after gaps
    are filled by regressions on the other columns.
    """
    x, y = table.drop(columns=["disease", "hospital"]), table["disease"]
    strata = table["hospital"] + y.astype(str)
    train, test = train_test_split(
        np.arange(len(y)), test_size=0.25, random_state=seed, stratify=strata
    )
    forest = RandomForestClassifier(300, min_samples_leaf=3, random_state=seed)
    boosting = HistGradientBoostingClassifier(max_depth=3, max_iter=100, random_state=seed)
    filled = make_pipeline(IterativeImputer(max_iter=5, random_state=seed), forest)
    found = [
        model.fit(x.iloc[train], y.iloc[train]).predict_proba(x.iloc[test])[:, 1]
        for model in (forest, boosting, filled)
    ]
    return [float(roc_auc_score(y.iloc[test], scores)) for scores in found]


def visible(table: pandas.DataFrame, seed: int) -> list[float]:
    """AUC on a quarter of the rows of a forest of all columns; and of forests trained on all
    hospitals' rows with no column hidden, each of the columns that one hospital has, for its own
    test rows: nothing is lost but these.
    """
    y, sites = table["disease"], table["hospital"]
    x, part = (form.drop(columns=["disease", "hospital"]) for form in (table, hidden(table, seed)))
    train, test = train_test_split(
        np.arange(len(y)), test_size=0.25, random_state=seed, stratify=sites + y.astype(str)
    )
    whole, own = np.zeros(len(y)), np.zeros(len(y))
    for site in ("", *sorted(sites.unique())):
        columns = [name for name in x if not site or part.loc[sites == site, name].notna().any()]
        rows = test[(sites.iloc[test] == site).to_numpy()] if site else test
        forest = RandomForestClassifier(300, min_samples_leaf=3, random_state=seed)
        forest.fit(x.iloc[train][columns], y.iloc[train])
        (own if site else whole)[rows] = forest.predict_proba(x.iloc[rows][columns])[:, 1]
    return [float(roc_auc_score(y.iloc[test], scores[test])) for scores in (whole, own)]


def main(path: str, seeds: int) -> None:
    """Print AUC over all test rows, and the mean of hospitals: with all columns, then with hidden
    ones.
    """
    table = pandas.read_csv(path)
    known: dict[str, Any] = {
        "label": "disease",
        "group": "hospital",
        "missing_columns": "allow",
        "public_rows": 0,
    }
    for seed in range(seeds):
        for method, settings in METHODS.items():
            found = [
                fedloom.run(method, data=x, seed=seed, **known, **settings)
                for x in (table, hidden(table, seed))
            ]
            scores = [result.summary["client_scores"] for result in found]
            print(
                seed,
                method,
                *(f"{s[name]['mean']:.4f}" for s in scores for name in ("auc", "own auc")),
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[3:] == ["visible"]:
        rows = pandas.read_csv(sys.argv[1])
        found = np.array([visible(rows, seed) for seed in range(int(sys.argv[2]))])
        lost, n = found[:, 0] - found[:, 1], len(found)
        # corrected for overlapping training rows
        error = np.sqrt(lost.var(ddof=1) * (1 / n + 1 / 3))
        half = stats.t(n - 1).ppf(0.975) * error
        print(
            *(
                f"{value:.4f}"
                for value in (*found.mean(0), lost.mean(), lost.mean() - half, lost.mean() + half)
            )
        )
    elif sys.argv[3:] == ["pooled"]:
        rows = pandas.read_csv(sys.argv[1])
        for seed in range(int(sys.argv[2])):
            print(
                seed,
                *(
                    f"{auc:.4f}"
                    for form in (rows, hidden(rows, seed))
                    for auc in pooled(form, seed)
                ),
                flush=True,
            )
    else:
        main(sys.argv[1], int(sys.argv[2]))
