"""Records of a node grow by a line for each call or sum, and survive a kill in the
middle of one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.remote.node.lines import Lines
from fedloom.remote.node.masking import SumRecord
from fedloom.remote.node.schedule import CallRecord
from fedloom.remote.rpc_errors import CallRefused


def calls(folder: Path, numbers: range) -> None:
    record = CallRecord(folder)
    for k in numbers:
        record.take(k, k, "update", -1, f"{k:064x}", 1, again=False)


def sums(folder: Path, numbers: range) -> None:
    record = SumRecord(folder)
    for k in numbers:
        record.list_once(f"{k:064x}", ["a", "b", "c"])
        record.agree_once(f"{k:064x}", ["a", "b", "c"])


@pytest.mark.parametrize("record", [calls, sums])
def test_a_record_is_appended_to_and_never_written_anew(record: object, tmp_path: Path) -> None:
    assert callable(record)
    record(tmp_path, range(100, 200))
    (file,) = tmp_path.iterdir()
    before = file.stat()
    record(tmp_path, range(200, 300))
    assert file.stat().st_ino == before.st_ino and file.stat().st_size == 2 * before.st_size


def test_the_rest_of_a_line_that_a_killed_node_began_is_removed(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "x.jsonl")
    lines.append([1, "a"])
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write(b'[2, "b')
    assert Lines(tmp_path / "x.jsonl").read() == [[1, "a"]]
    lines.append([3])
    assert lines.read() == [[1, "a"], [3]]
    assert Lines(tmp_path / "none").read() == []


def test_a_call_that_is_refused_keeps_no_other_call_out(tmp_path: Path) -> None:
    record = CallRecord(tmp_path)
    record.take(0, 0, "update", -1, "a", 1, again=False)
    record.take(1, 5, "update", -1, "b", 1, again=False)
    record.back(2)
    record.take(2, 2, "update", -1, "c", 1, again=False)
    for round in (0, 1):
        with pytest.raises(CallRefused, match=f"round {round} is over"):
            record.take(3, round, "update", -1, "d", 1, again=False)
    with pytest.raises(CallRefused, match="other arguments, before this node went back"):
        record.take(4, 5, "update", -1, "e", 1, again=False)
    record.take(4, 3, "update", -1, "f", 1, again=False)
