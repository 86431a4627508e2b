"""Who has which row: drawn, listed in a file, or as files have it; what is blank, what is dropped,
what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.evaluation import contribution
from fedloom.data.party_files import from_files
from fedloom.data.presence import RowPresence, complete_rows, read_presence
from fedloom.data.simulation import simulate
from fedloom.experiment.plan.build import build, parties_of
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
from tests.data.test_party_files import files, match, write

__all__ = ["files"]  # a fixture
HALF = RowPresence(3, (0.5, 0.0, 0.2), (0.0, 0.5, 0.2))


def wine(presence: RowPresence | None = HALF, **options: Any) -> Any:
    return simulate(
        "wine", parties=3, seed=1, aligned=60, unaligned=10, presence=presence, **options
    )


def config(method: str = "split", **columns: Any) -> Any:
    params = columns.pop("params", {})
    values = {"aligned": 60, "unaligned": 10, **columns}
    data = {"name": "wine", "clients": 3}
    return check(
        {"run": {"method": method, "rounds": 1, "data": data, "columns": values, "params": params}}
    ).run


def test_draws_are_those_of_a_party_and_a_part_and_blank_what_is_missing() -> None:
    parties, whole = wine(), wine(None)
    shares = [
        (1 - view.has(view.aligned).mean(), 1 - view.has(view.test).mean())
        for view in parties.views
    ]
    for (train, test), expected in zip(shares, ((0.5, 0), (0, 0.5), (0.2, 0.2)), strict=True):
        assert abs(train - expected[0]) < 0.2 and abs(test - expected[1]) < 0.25
        assert (train == 0) == (expected[0] == 0) and (test == 0) == (expected[1] == 0)
    for view, other in zip(parties.views, whole.views, strict=True):
        assert other.present is None and view.has(view.unaligned).all()
        assert view.present is not None and not view.x[~view.present].any()
    assert np.array_equal(
        parties.views[1].x[parties.views[1].aligned], whole.views[1].x[whole.views[1].aligned]
    )
    # its scales are of the rows that it has
    assert not np.array_equal(parties.views[0].x, whole.views[0].x)
    more = simulate("wine", parties=3, seed=1, aligned=80, unaligned=10, presence=HALF)
    for view, larger in zip(parties.views, more.views, strict=True):
        assert np.array_equal(view.has(view.aligned), larger.has(larger.aligned)[:60])


def test_incomplete_rows_become_unaligned_where_they_are() -> None:
    parties = wine()
    found = complete_rows(parties)
    whole = np.all([view.has(view.aligned) for view in parties.views], axis=0)
    assert len(found.labels) == whole.sum() and np.array_equal(found.labels, parties.labels[whole])
    for before, after in zip(parties.views, found.views, strict=True):
        assert after.has(after.aligned).all() and after.truth is not None
        assert (
            len(after.unaligned)
            == len(before.unaligned) + (before.has(before.aligned) & ~whole).sum()
        )
        assert np.array_equal(before.x[before.aligned[whole]], after.x[after.aligned])
    assert (
        len(complete_rows(parties, (1,)).labels) == 60
        and complete_rows(wine(None)).views[0].present is None
    )
    with pytest.raises(DataError, match="None of 60 aligned rows is complete"):
        complete_rows(wine(RowPresence(0, (0.99,) * 3, (0, 0, 0))))


def test_a_file_of_presence(tmp_path: Path) -> None:
    whole = simulate("digits", parties=3, seed=1, aligned=20, unaligned=5)
    path = write(tmp_path / "had.csv", "row,a,b,c", ["0,1,0,yes", "3,No,1,true", "99999,0,0,0"])
    listed = read_presence(path, "row", 3)
    assert listed == {
        "0": (True, False, True),
        "3": (False, True, True),
        "99999": (False, False, False),
    }
    rule = RowPresence(listed=listed)
    assert [rule.of(m, [0, 5, 3], [3])[0].tolist() for m in range(3)] == [
        [True, True, False],
        [False, True, True],
        [True, True, True],
    ]
    assert whole.views[0].present is None
    for text, rows in {
        "a column for each of 3 parties": ["row,a,b", "0,1,1"],
        "names a row twice": ["row,a,b,c", "0,1,1,1", "0,1,1,1"],
        "has the cell 'maybe'": ["row,a,b,c", "0,1,maybe,1"],
    }.items():
        with pytest.raises(DataError, match=text):
            read_presence(write(tmp_path / "bad.csv", rows[0], rows[1:]), "row", 3)
    found = build(config("laser-vfl", presence=str(path))).data.parties
    assert found is not None and [view.present is not None for view in found.views] == [True] * 3


def test_people_that_other_files_lack(files: list[Path]) -> None:
    """All of the bank's people with a label; the shop lacks those below 010, the phone company
    those below 005.
    """
    parties = from_files(files, id="id", label="risk", seed=0, align=match, anybody=True)
    assert len(parties.labels) + len(parties.test_labels) == 39
    bank, shop, phone = parties.views
    assert bank.present is not None and bank.present.all()
    missing = [
        sum(int((~view.has(rows)).sum()) for rows in (view.aligned, view.test))
        for view in (shop, phone)
    ]
    assert missing == [10, 5] and len(bank.unaligned) == 1
    # people whom the bank does not know or label
    assert [len(view.unaligned) for view in (shop, phone)] == [11, 6]
    few = from_files(files, id="id", label="risk", seed=0, align=match, anybody=True, aligned=9)
    assert len(few.labels) == 9 and all((view.truth is None) for view in few.views)
    section = {
        "files": [str(file) for file in files],
        "id": "id",
        "label": "risk",
        "missing": "files",
    }
    run = check({"run": {"method": "laser-vfl", "rounds": 1, "columns": section}}).run
    assert execute(run).summary["state_sha256"]
    assert len(parties_of(run).labels) == len(parties.labels)


def test_each_method_uses_drops_or_refuses_incomplete_rows() -> None:
    counts = {}
    for name, params in {
        "laser-vfl": {},
        "split": {},
        "split zeros": {"incomplete": "zeros"},
        "split mix": {"incomplete": "mix"},
        "active-only": {},
        "proto-evfl": {},
    }.items():
        plan = build(config(name.partition(" ")[0], missing=0.3, missing_seed=5, params=params))
        assert plan.server is not None
        counts[name] = plan.server.context.aligned
        context = plan.clients[1]().context
        assert (context.rows.present is None) == (name in ("split", "proto-evfl"))
        assert context.tests["test"].present is not None
    complete = counts["split"]
    assert counts == {
        "laser-vfl": 60, "split": complete, "split zeros": 60, "split mix": 60,
        "active-only": counts["active-only"], "proto-evfl": complete,
    }  # fmt: skip
    assert 10 < complete < counts["active-only"] < 60
    with pytest.raises(ConfigError, match="pooled counts every row as complete"):
        build(config("pooled", missing=0.3))


@pytest.mark.parametrize("method", ["split", "proto-evfl", "laser-vfl"])
def test_a_contribution_has_zeros_for_test_rows_that_the_party_lacks(method: str) -> None:
    plan = build(config(method, missing_test=0.4))
    party = plan.clients[2]()
    present = party.context.tests["test"].present
    assert present is not None and plan.clients[2]().context.rows.present is None
    found: Any = contribution(party, on="test")
    assert torch.equal((found != 0).any(1), present)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"missing": 1.5}, "columns: missing must be from 0 to 1, not 1.5"),
        ({"missing_test": [0.1, -1]}, "columns: missing_test must be from 0 to 1"),
        (
            {"presence": "x.csv", "missing": 0.1},
            "columns: presence says which rows are missing: leave missing out",
        ),
        ({"missing": "files"}, 'columns: missing = "files" needs files'),
        (
            {"private": True, "id": "a", "label": "b", "missing": 0.1},
            "columns: with private = true",
        ),
    ],
)
def test_contradictions_are_named(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        check({"run": {"method": "laser-vfl", "columns": section}})
    assert text in str(error.value)


def test_one_probability_for_each_party() -> None:
    with pytest.raises(
        ConfigError, match=r"columns\.missing: one value, or one for each of 3 parties, not 2"
    ):
        build(config("laser-vfl", missing=[0.1, 0.2]))
    parties = build(config("laser-vfl", missing=[0.0, 0.5, 0.0], missing_test=0.0)).data.parties
    assert parties is not None and [
        bool(v.present is not None and not v.present.all()) for v in parties.views
    ] == [
        False,
        True,
        False,
    ]
