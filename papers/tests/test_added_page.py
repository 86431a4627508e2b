"""A page that is added to fedloom is a method of `fedloom reproduce`, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.methods.test_added_page import METHOD, fedloom

__all__ = ["fedloom"]

REPRODUCTION = f"""
title = "The example beside Local"
system = "fedal"
place = "Table I"
across = "skew"

[[rows]]
name = "Example"
run = {{ method = "{METHOD}" }}

[[rows]]
name = "Local"
run = {{ method = "local" }}

[[columns]]
name = "α = 1"
run = {{ data = {{ options = {{ alpha = 1.0 }} }} }}

[[claims]]
text = "Averaging is more accurate than training alone."
left = "Example"
right = "Local"

[small]
seeds = 2
run = {{ rounds = 2, models = {{ pool = ["mlp"] }}, data = {{ clients = 3 }} }}

[paper]
run = {{ rounds = 2 }}
"""


@pytest.mark.slow
def test_a_file_in_a_family_is_a_method_of_a_table(
    fedloom: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(REPRODUCTION)
    fedloom("reproduce", "mine.toml", "--seeds", "1", "--out", "made")
    (table,) = (tmp_path / "made").rglob("mine/table.md")
    assert "Example" in table.read_text() and "Local" in table.read_text()
