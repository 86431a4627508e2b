"""`[aggregate]` at three real nodes: a user's page gets a robust, a secure and a private mean with
no line about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.api import execute
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry
from fedloom.remote import rpc_errors
from fedloom.remote.node.method_policy import MethodPolicy
from fedloom.remote.node_session import NodeSession
from tests.net.nodes import federation
from tests.net.test_faults import same
from tests.node.hosts import RunRequest, config, doing, node, opening

FEDPROX = Path(__file__).parents[2] / "examples" / "fedprox.py"
RUN: dict[str, Any] = {
    "method": str(FEDPROX),
    "rounds": 2,
    "data": {"clients": 3, "public_rows": 40, "test_rows": 60, "own_test_rows": 10},
    "models": {"pool": ["linear"], "norm": "none"},
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    change = {"methods": ["fedprox", "fedavg"], "pages": [FEDPROX], "min_sum": 3}
    with federation(tmp_path_factory.mktemp("three"), 3, lambda _: change) as (path, _):
        yield path


@pytest.mark.parametrize(
    "aggregate", [{"rule": "median"}, {"secure": True}, {"noise": {"sigma": 0.1}}], ids=str
)
def test_an_example_s_means_at_nodes_have_the_loop_s_bits(
    aggregate: dict[str, Any], three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[Any] = []
    run_tasks = NodeSession.run_tasks

    async def seen(self: NodeSession, tasks: Any, *more: Any) -> Any:
        found = await run_tasks(self, tasks, *more)
        replies.extend(
            reply
            for task, reply in zip(tasks, found.results, strict=True)
            if task.method == "update"
        )
        return found

    monkeypatch.setattr(NodeSession, "run_tasks", seen)
    run = check({"run": {**RUN, "aggregate": aggregate}}).run
    net = run.engine.model_copy(update={"name": "net", "federation": str(three)})
    there = execute(run.model_copy(update={"engine": net})).summary
    same(there, execute(run).summary)
    assert len(replies) == 6
    masked = [
        not isinstance(reply, dict) and str(reply.dtype) == "torch.int64" for reply in replies
    ]
    assert all(masked) if aggregate.get("secure") else not any(masked)


OTHER = (
    FEDPROX.read_text()
    .replace('"weights"', '"theta"')
    .replace("weights", "theta")
    .replace('"rows"', '"n"')
)
"""The same page by other names, and with a field that says the contrary of the run."""


@pytest.mark.parametrize(
    "field", ["secure: bool = False", "masked: bool = False", "mu2: float = 0.1"]
)
def test_no_name_of_a_page_s_field_lets_a_single_reply_out(field: str, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(OTHER.replace("    epochs: int = 1\n", f"    epochs: int = 1\n    {field}\n"))
    ask = RunRequest(node(tmp_path, methods=["fedprox"], pages=[page], peers=["a", "b"], min_sum=3))
    try:
        ask(
            "open",
            opening(
                config(method="fedprox", **{"aggregate.secure": True}), members={"1": "a", "2": "b"}
            ),
        )
        refusal = ask.refused("do", doing(0, ask.host))
        assert (
            "with aggregate.secure = true, replies of this method are sent as part of a sum only"
            in refusal.words
        )
        unknown = ask.refused("do", doing(0, ask.host, mask={"sum": "x", "weight": "n"}))
        assert unknown.code == rpc_errors.MALFORMED
    finally:
        ask.close()


def test_the_policy_s_old_setting_is_refused_with_the_new_one() -> None:
    (words,) = MethodPolicy(fixed={"secure": True}).problems(registry()["fedavg"])
    assert (
        words
        == "fixed: secure is no setting of a method any more: write secure = true beside fixed"
    )
    (words,) = MethodPolicy(secure=True).problems(registry()["fedpcl"])
    assert words == "secure: the method takes no mean of clients' replies, so it has no secure sums"


def test_a_node_s_own_policy_may_require_secure_sums(tmp_path: Path) -> None:
    ask = RunRequest(
        node(tmp_path, methods={"fedavg": {"secure": True}}, peers=["a", "b"], min_sum=3)
    )
    try:
        words = "fedavg has aggregate.secure = false; this node requires true"
        assert words in ask.refused("open", opening(config())).words
        ask("open", opening(config(**{"aggregate.secure": True}), members={"1": "a", "2": "b"}))
    finally:
        ask.close()
