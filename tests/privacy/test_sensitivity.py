"""One replaced row moves what is clipped by twice the norm at most, whatever the row holds: its
scale is public.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.methods.averaging import private
from tests.experiment.test_own_data import FORM, rows, run

CLIP = 0.5
AGREED = {"a": [1.5, 2.0], "b": [10.0, 5.0]}
REPLACED = ("1e9,-1e9,x,one", "-3.4e38,3.4e38,y,two", ",,x,one", "1e-40,0,y,one", ",1e30,,two")
GUARANTEES: dict[str, dict[str, Any]] = {
    "fedavg-dp": {"dp": {"clip": CLIP}},
    "afind-plus": {"threshold": "anchored", "dp": {"target": "phi", "clip": CLIP}},
    "fedmd": {"trust": "kernel", "trust_epsilon": 2.0},
}


def training(method: str = "fedavg-dp", scale: Any = AGREED, **params: Any) -> Any:
    given = {"batch_size": 8, **GUARANTEES[method], **params}
    form = {**FORM, "columns": [*FORM["columns"][:2], {"name": "c", "categories": ["x", "y", "?"]}]}
    data = {"row_schema": form if scale is None else {**form, "scale": scale}, "missing": "median"}
    return run(method=method, params=given, models={"pool": ["mlp"]}, data=data)


def moved(tmp_path: Path, kind: Any, public: Path | None) -> float:
    """The largest distance, in clipping norms, that a replaced row moves the clipped sum by, at
    some weights.
    """
    sent, sums = for_nodes(build(kind, PrivateData(public=public))), []
    path = rows(tmp_path / "own.csv", 40, 3)
    lines = path.read_text().splitlines()
    for cells in (lines[8], *REPLACED):
        path.write_text("\n".join([*lines[:8], cells, *lines[9:], ""]))
        party: Any = build_party(sent, 0, PrivateData(rows=path, public=public, split_seed=5)).party
        seen = []
        for seed, size in enumerate((0.1, 1.0, 100.0, 1e4)):
            rng = torch.Generator().manual_seed(seed)
            party.params = {
                k: size * torch.randn(v.shape, generator=rng) for k, v in party.params.items()
            }
            seen.append(
                private.clipped_sum(party, list(party.params), torch.arange(len(party.data)))
            )
        sums.append(torch.stack(seen))
    return max(float((one - sums[0]).norm(dim=1).max()) for one in sums) / CLIP


@pytest.mark.parametrize("scale", [AGREED, None], ids=["agreed", "public rows"])
def test_a_replaced_row_moves_the_sum_by_two_norms_at_most(scale: Any, tmp_path: Path) -> None:
    public = rows(tmp_path / "public.csv", 50, 9, labels=False) if scale is None else None
    assert 0.5 < moved(tmp_path, training(scale=scale), public) <= 2 * (1 + 1e-6)


def test_numbers_are_cut_off_at_five_deviations_of_the_agreed_scale(tmp_path: Path) -> None:
    """So that no row puts a network where others' rows are lost beside it."""
    path, sent = rows(tmp_path / "own.csv", 40, 3), for_nodes(build(training(), PrivateData()))
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([*lines[:8], "1e9,-1e9,x,one", "-3.4e38,3.4e38,y,two", *lines[10:], ""])
    )
    party: Any = build_party(sent, 0, PrivateData(rows=path, split_seed=5)).party
    far = torch.cat([party.data.every, party.context.tests["own"].every])[:, :2].abs()
    assert float(far.max()) == pytest.approx(5.0) and int((far > 4.99).sum()) >= 4


@pytest.mark.parametrize("method", GUARANTEES)
def test_a_guarantee_without_a_public_scale_is_refused(method: str, tmp_path: Path) -> None:
    public = rows(tmp_path / "public.csv", 50, 9, labels=False)
    if method != "fedmd":  # which needs public rows anyway
        with pytest.raises(
            ConfigError, match=r"data.row_schema.scale = \{ age = \[mean, s.d.\] \}"
        ):
            build(training(method, scale=None), PrivateData())
    build(training(method, scale=None), PrivateData(public=public))


@pytest.mark.parametrize("scale", [{"a": [0, 1]}, {**AGREED, "c": [0, 1]}, {**AGREED, "b": [0, 0]}])
def test_a_scale_names_every_numeric_column_and_no_other(scale: Any) -> None:
    with pytest.raises(ConfigError, match="scale"):
        training(scale=scale)
