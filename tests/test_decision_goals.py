"""The benchmark of a trial's decisions: true gains, archives and goals."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks import decisions
from benchmarks.decision_goals import Outcome, at_most, goals, line_of, read, table
from benchmarks.decisions import DESIGNS, expected, labels, simulate


@pytest.mark.parametrize(
    "score", ["auc", "accuracy", "balanced accuracy", "log loss", "brier", "rmse", "mae", "r2"]
)
def test_the_expected_score_is_the_mean_over_labels(score: str) -> None:
    from fedloom.experiment.trial.contributions import contributions

    rng = np.random.default_rng(0)
    signal = rng.normal(size=400)
    line = signal + rng.normal(size=400)
    p = 1 / (1 + np.exp(-line))
    predicted = line if score in ("rmse", "mae", "r2") else np.stack([1 - p, p], axis=1)
    drawn = [
        contributions(score, labels(score, signal, 0.3, rng), predicted, np.zeros(400))[0]
        for _ in range(300)
    ]
    (found,) = expected(score, signal, 0.3, predicted[None])
    assert found == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / np.sqrt(300) + 0.002)


def test_without_a_signal_no_area_differs() -> None:
    owners = simulate("no signal", "auc", 5, 0)
    assert [one.true for one in owners] == pytest.approx([0.0, 0.0], abs=1e-12)


def test_an_archive_is_read_as_it_was_written(tmp_path: Path) -> None:
    owners = [
        Outcome("join", 0.1, 0.02, 0.18, 0.07, 0.5, 0.9, 0.06, 0.99),
        Outcome("too few", *[np.nan] * 8),
    ]
    key = ("auc", DESIGNS[0], 3, 1)
    file = tmp_path / "a.jsonl"
    file.write_text(line_of(key, owners))
    found = read([file, tmp_path / "missing.jsonl"])
    assert [*found] == [key] and found[key][0] == owners[0]
    assert found[key][1].decision == "too few" and np.isnan(found[key][1].gain)


def test_goals_are_met_by_the_upper_limit_of_a_rate() -> None:
    assert at_most(0, 146) == pytest.approx(1 - 0.025 ** (1 / 146)) and at_most(3, 3) == 1.0

    def of(decision: str, true: float) -> Outcome:
        return Outcome(decision, true, true - 0.05, true + 0.05, true, 0.4, 0.9, true, 0.5)  # type: ignore[arg-type]

    owners = (
        [of("same", 0.0)] * 200
        + [of("join", -0.001)] * 8
        + [of("join", 0.05)] * 4
        + [of("alone", 0.02)]
    )
    text = goals({("auc", "one small", 0, 0): owners})
    assert (
        "8 of 208 (≤ 0.074), **not met** | 8 of 12 |" in text
        and "1 of 5 (≤ 0.716), **not met**" in text
    )
    assert "1.00 of 4, best 0.90, met" in text and "0.00 of 1, best 0.90, **not met**" in text
    assert "208 0 1 4" in table({("auc", "one small", 0, 0): owners})


def test_the_page_has_the_tables_of_the_archive() -> None:
    page = (Path(__file__).parents[1] / "docs" / "results" / "trial.md").read_text(encoding="utf-8")
    known = read([Path(decisions.__file__).parent / "archive" / "decisions.jsonl"])
    for score in {key[0] for key in known}:
        found = {key: owners for key, owners in known.items() if key[0] == score}
        assert table(found) in page and goals(found) in page
