"""What a coordinator learns by opening runs at real nodes, whose files differ in a row: the same of
both.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

from fedloom.api import execute
from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import EngineConfig
from tests.experiment.test_own_data import ALLOWED, FORM, rows, run
from tests.net.nodes import federation
from tests.privacy.test_opening import ODD, WORDS, replaced


def told(folder: Path, form: dict[str, Any]) -> list[str]:
    """What two nodes answer to a run with this schema, without their names."""
    given = run(
        method="local", rounds=1, models={"pool": ["linear"]}, params={}, data={"row_schema": form}
    )
    engine = EngineConfig(name="net", federation=str(folder / "federation.toml"))
    data = given.data.model_copy(update={"clients": 2})
    try:
        execute(given.model_copy(update={"engine": engine, "data": data}))
    except ConfigError as error:
        return [
            re.sub("node-[01]", "node", line) for line in re.split(r"; (?=node-)|\n", str(error))
        ]
    return ["opened"] * 2


def test_every_choice_of_words_has_one_answer_over_the_wire(tmp_path: Path) -> None:
    files = {
        "node-0": rows(tmp_path / "usual.csv", 80, 3),
        "node-1": replaced(tmp_path / "odd.csv", ODD[2]),
    }
    data = {**ALLOWED, "categories": {"c": ["x", "y"]}}

    def own(name: str) -> dict[str, Any]:
        return {
            "min_rows": 4,
            "methods": ["local"],
            "data": {"wards": {"rows": files[name], "score": True, **data}},
        }

    outcomes = {}
    with federation(tmp_path, 2, own):
        for count in (1, 2):
            for words in combinations(WORDS, count):
                form = {**FORM, "columns": ["a", "b", {"name": "c", "categories": list(words)}]}
                outcomes[words] = told(tmp_path, form)
    assert all(len(found) == 2 and found[0] == found[1] for found in outcomes.values()), outcomes
    assert [words for words, found in outcomes.items() if found[0] == "opened"] == [("x", "y")]
