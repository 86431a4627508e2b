"""One budget for the people of a file: whatever file or run it is, and whatever copy of the folder
is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError, PrivacyBudgetSpent
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.protect.accountant import Releases, epsilon
from fedloom.remote.node import budget, limits
from fedloom.remote.node.budget import FILE, NEXT, Budget, Spent
from fedloom.remote.node.config import NodeData
from fedloom.remote.node.limits import OwnerLimits
from fedloom.remote.node.privacy_ledger import charge, exhaust
from fedloom.remote.rpc_errors import REFUSED, CallRefused
from fedloom.support import paths
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.node.hosts import RunRequest, doing, opening
from tests.node.test_matching import OURS, begin, client, step

Hosts = Callable[..., RunRequest]
ONE = Releases(4.0, 1, 1.0)


def spend(folder: Path, file: Path, cohort: str = "wards", anchor: Path | None = None) -> None:
    charge(Budget(folder, anchor), cohort, file, ONE, 10.0, 1e-5)


def anchored(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of a node, and the anchor that its owner made."""
    folder, anchor = tmp_path / "state", tmp_path / "anchor"
    folder.mkdir(exist_ok=True)
    Budget(folder, anchor).begin_anchor()
    return folder, anchor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.csv").write_text("a\n1\n")
    return tmp_path / "own.csv"


@pytest.mark.parametrize("copy", [os.link, shutil.copy], ids=["hard link", "copy"])
def test_a_file_under_another_name_is_no_new_budget(
    copy: Callable[..., Any], tmp_path: Path, file: Path
) -> None:
    spend(tmp_path, file)
    copy(file, tmp_path / "other.csv")
    with pytest.raises(PrivacyBudgetSpent, match="same people"):
        spend(tmp_path, tmp_path / "other.csv", "others")
    spend(tmp_path, tmp_path / "other.csv")
    assert Budget(tmp_path).spent("wards").all_releases() == [Releases(4.0, 2, 1.0)]


@pytest.mark.parametrize("older", ["copy", "nothing", "{}", "earlier version"])
def test_an_older_folder_allows_nothing_until_its_owner_accepts_it(
    older: str, tmp_path: Path, file: Path
) -> None:
    folder, anchor = anchored(tmp_path)
    spend(folder, file, anchor=anchor)
    kept = (folder / FILE).read_bytes()
    spend(folder, file, anchor=anchor)
    (folder / FILE).unlink()
    if older == "earlier version":
        (folder / "privacy.json").write_text("{}")
    elif older != "nothing":
        (folder / FILE).write_bytes(kept if older == "copy" else b"{}")
    with pytest.raises(PrivacyBudgetSpent, match="its owner must restore"):
        spend(folder, file, anchor=anchor)
    if older == "{}":
        return
    assert Budget(folder, anchor).accept_restored(
        lambda cohorts: exhaust(cohorts.setdefault("wards", Spent()), 10, 1e-5)
    )
    assert epsilon(Budget(folder, anchor).spent("wards").all_releases(), 1e-5) >= 9.99
    with pytest.raises(PrivacyBudgetSpent, match="would make it"):
        spend(folder, file, anchor=anchor)


def is_an_anchor(path: Path) -> bool:
    return path.name == "anchor"


def is_the_record(path: Path) -> bool:
    return path.name == FILE


@pytest.mark.parametrize(("dies_at", "counted"), [(is_an_anchor, False), (is_the_record, True)])
def test_a_node_killed_while_it_charges_keeps_its_budget(
    dies_at: Callable[[Path], bool],
    counted: bool,
    tmp_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the anchor nothing was charged and nothing let out; after it the charge
    counts, once.
    """
    folder, anchor = anchored(tmp_path)
    spend(folder, file, anchor=anchor)
    writing = paths.write_atomically

    class Killed(BaseException):
        pass

    def write(path: Path, data: bytes) -> None:
        if dies_at(path):
            raise Killed
        writing(path, data)

    for _ in range(2):  # as a node that is started again, and killed there again
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(budget, "write_atomically", write)
            spend(folder, file, anchor=anchor)
    before = 1 + 2 * counted
    assert Budget(folder, anchor).spent("wards").all_releases() == [Releases(4.0, before, 1.0)]
    spend(folder, file, anchor=anchor)
    assert Budget(folder, anchor).spent("wards").all_releases() == [Releases(4.0, before + 1, 1.0)]
    assert not (folder / NEXT).exists()
    assert json.loads(anchor.read_text()) == json.loads((folder / FILE).read_text())["number"]


def test_a_draft_is_no_way_around_the_anchor(tmp_path: Path, file: Path) -> None:
    """A copy of the folder from between two changes is old, too."""
    (folder, anchor), copy = anchored(tmp_path), tmp_path / "copy"
    spend(folder, file, anchor=anchor)
    shutil.copytree(folder, copy)
    shutil.copy(copy / FILE, copy / NEXT)
    spend(folder, file, anchor=anchor)
    with pytest.raises(PrivacyBudgetSpent, match="older than its anchor"):
        Budget(copy, anchor).spent("wards")


def test_a_deleted_anchor_allows_nothing_until_its_owner_accepts_it(
    tmp_path: Path, file: Path
) -> None:
    (tmp_path / "state").mkdir()
    spend(tmp_path / "state", file)  # before the node had an anchor
    folder, anchor = anchored(tmp_path)
    anchor.unlink()
    with pytest.raises(
        PrivacyBudgetSpent, match="anchor is missing: its owner must restore that file, or run"
    ):
        spend(folder, file, anchor=anchor)
    Budget(folder, anchor).accept_restored(lambda cohorts: exhaust(cohorts["wards"], 10, 1e-5))
    assert int(anchor.read_text()) == 3
    with pytest.raises(ConfigError, match="to a file that does not exist yet"):
        Budget(folder, anchor).begin_anchor()
    with pytest.raises(PrivacyBudgetSpent, match="would make it"):
        spend(folder, file, anchor=anchor)


def test_a_node_without_record_and_anchor_does_not_count_as_new(tmp_path: Path, file: Path) -> None:
    """Both are lost with a machine, and somebody could delete both."""
    folder, anchor = anchored(tmp_path)
    spend(folder, file, anchor=anchor)
    anchor.unlink()
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(PrivacyBudgetSpent, match=r"anchor has not been made: .* --new-anchor"):
        spend(folder, file, anchor=anchor)
    assert "--new-anchor" in Budget(folder, anchor).problem() and not anchor.exists()


def test_a_restored_record_counts_all_limits(tmp_path: Path) -> None:
    """Not ε alone: scores, ids, answers and introductions since the copy are unknown, too."""
    rows(tmp_path / "own.csv", 80, 3), rows(tmp_path / "public.csv", 50, 9, labels=False)
    data = NodeData(rows=tmp_path / "own.csv", public=tmp_path / "public.csv", **ALLOWED)
    limits.exhaust(spent := Spent(looks=3), data)
    assert (spent.looks, spent.ids, spent.answers, bool(spent.introduced)) == (100, 160, 100, True)
    assert epsilon(spent.all_releases(), 1e-5) >= 9.99
    limits.exhaust(
        spent := Spent(looks=300, introduced="x"),
        data.model_copy(update={"ids_total": 7, "max_answers": 9}),
    )
    assert (spent.looks, spent.ids, spent.answers, spent.introduced) == (300, 7, 9, "x")


def opened(
    hosts: Hosts,
    tmp_path: Path,
    public: Path,
    method: str,
    seed: int = 0,
    limits: Any = (),
    **params: Any,
) -> Any:
    """A node with a run of trust or of answers on its rows."""
    data = {"wards": {"rows": tmp_path / "own.csv", "public": public, **ALLOWED}}
    ask = hosts(methods=[method], data=data, max_runs=9)
    given = {"batch_size": 8, **params}
    kind = run(method=method, models={"pool": ["linear"]}, params=given, seed=seed)
    text = for_nodes(build(kind, PrivateData(public=public))).model_dump_json()
    ask("open", opening(text, start=1 + seed))
    return ask


def test_rows_are_introduced_with_one_set_of_settings_over_all_runs(
    hosts: Hosts, tmp_path: Path
) -> None:
    public = rows(tmp_path / "public.csv", 50, 9, labels=False)
    rows(tmp_path / "own.csv", 80, 3)

    def introduce(seed: int, **params: Any) -> tuple[RunRequest, bytes]:
        ask = opened(hosts, tmp_path, public, "fedmd", seed, trust="distance", **params)
        return ask, doing(0, ask.host, method="introduce", start=1 + seed, shared={})

    ask, body = introduce(0, trust_neighbours=3)
    ask("do", body)
    ask, body = introduce(1, trust_neighbours=3)  # another run: the same numbers
    ask("do", body)
    ask, body = introduce(2, trust_neighbours=4)
    assert "only once" in ask.refused("do", body).words
    ask, body = introduce(3, trust_neighbours=3, trust_bits="none")
    assert "few bits" in ask.refused("do", body).words


def test_a_node_answers_so_many_rows_of_coordinators_in_all_runs(
    tmp_path: Path, file: Path
) -> None:
    public = SimpleNamespace(rows=range(50))
    own = SimpleNamespace(x=lambda rows: torch.zeros(len(rows), 4))
    declared = {"TELLS": (("answers", ("predicted",)),)}
    kind = type("Answering", (SimpleNamespace,), declared)
    party: Any = kind(cfg=None, context=SimpleNamespace(public=public), data=own)
    allowed = OwnerLimits(Budget(tmp_path), "wards", NodeData(rows=file), party)
    # many rows as one, for a network that takes any number of dimensions
    for shape in ((1, 10**4, 4), (4,), (1, 5)):
        with pytest.raises(CallRefused, match="the shape of this node's own"):
            allowed.check("predicted", {"rows": torch.zeros(shape)})
    for count in (60, 40):  # two runs
        allowed = OwnerLimits(Budget(tmp_path), "wards", NodeData(rows=file), party)
        allowed.check("predicted", {"rows": torch.zeros(count, 4)})
    with pytest.raises(CallRefused, match="at most 100 rows"):
        allowed.check("predicted", {"rows": torch.zeros(1, 4)})
    allowed.check("update", {"rows": torch.zeros(10**4, 4)})


def test_matchings_test_so_many_ids_in_all_runs(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "lab.csv"
    path.write_text("patient,a\n" + "".join(f"{id},{n}\n" for n, id in enumerate(OURS)))
    ask = hosts(methods=["split"], data={"people": {"rows": path}}, min_rows=1)
    answered = 0
    for k in range(20):
        name = f"{k:032x}"
        try:
            ask("match", begin(rows=10, run=name))
        except CallRefused as refusal:
            assert refusal.code == REFUSED and "ids_total" in refusal.words
            continue
        answered += 1
        ask("match", step("shard", client().request(), shard=0, run=name))
        ask("match", step("leave", run=name))
    assert answered == 2  # 20 of at most 2 x 12 ids
    assert json.loads((ask.config.state / FILE).read_text())["cohorts"]["people"]["ids"] == 20
