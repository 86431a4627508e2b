"""What a site's officer decides: which run begins, in which words it is asked for, who may decide,
what may leave.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography import x509

from fedloom.cli import approval as command
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.experiment.plan.build import build, resolve
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.methods import registry, steps
from fedloom.protect.accountant import epsilon
from fedloom.remote import payload
from fedloom.remote.certs import CertificateAuthority, fingerprint, write
from fedloom.remote.credentials import Credentials
from fedloom.remote.node import approval
from fedloom.remote.node.audit import verify
from fedloom.remote.node.decision import What
from fedloom.remote.node.outgoing import Outgoing, OutgoingFilter
from fedloom.remote.node.terms import own_epsilon, sha256, terms, weaknesses
from fedloom.remote.rpc_errors import PENDING, REFUSED, STOPPED, CallRefused
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.node.hosts import RUN, RunRequest, doing, opening, which

Hosts = Callable[..., RunRequest]


def config(**changes: Any) -> str:
    kind = {
        "method": "fedavg",
        "models": {"pool": ["linear"]},
        "params": {"batch_size": 8},
        **changes,
    }
    return for_nodes(build(run(**kind), PrivateData())).model_dump_json()


@pytest.fixture
def own(hosts: Hosts, tmp_path: Path) -> Hosts:
    """Hosts with 80 rows of their own, whose site is asked."""
    path = rows(tmp_path / "own.csv", 80, 3)

    def make(data: dict[str, Any] | None = None, **values: Any) -> RunRequest:
        given = {"approve": "ask", "max_runs": 9, "methods": ["fedavg", "fedavg-dp"], **values}
        return hosts(data={"wards": {"rows": path, **ALLOWED, **(data or {})}}, **given)

    return make


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)


def folder(ask: RunRequest) -> Path:
    return ask.config.state / approval.FOLDER


def decided(ask: RunRequest, what: What = "approve", run: str = RUN) -> None:
    approval.decide(ask.config.state, approval.find(ask.config.state, run), what, None)


# -- waiting and approving -------------------------------------------------------------------------


def test_a_run_on_own_rows_waits_until_it_is_approved(
    own: Hosts, sure: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = own()
    for _ in range(3):
        assert ask.refused("open", opening(config())).code == PENDING
    assert not [*ask.config.state.glob("run-*")] and ask.audited("refused") == []
    command.show(ask.config)
    assert RUN[:8] in (shown := capsys.readouterr().out) and "waits" in shown
    command.decide(ask.config, RUN[:8], "approve", None)
    text = approval.waiting(folder(ask), RUN).text
    shown = capsys.readouterr().out
    assert (
        text in shown and sha256(text) in shown and "Spent so far: wards: ε = 0.000 of 10" in shown
    )
    assert payload.unpack(ask("open", opening(config())))[0]["resumed"] is False
    lines = [(line["what"], line.get("summary"), line.get("by")) for line in ask.audited()]
    hashed, machine = sha256(text), "a user of this machine"
    assert lines == [
        ("waits for approval", hashed, None),
        ("approved", hashed, machine),
        ("opened", None, None),
    ]
    command.show(ask.config)
    assert "approved" in capsys.readouterr().out


def test_an_approval_holds_after_a_restart_and_for_this_summary_alone(own: Hosts) -> None:
    ask = own()
    ask.refused("open", opening(config()))
    decided(ask)
    ask("open", opening(config()))
    again = own()
    again("open", opening(config(), start=2))
    longer = opening(config(rounds=9), start=3)
    # the coordinator asks for more under the same name
    assert again.refused("open", longer).code == PENDING
    decided(again)
    again("open", longer)


def test_who_does_not_confirm_approves_nothing(own: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = own()
    ask.refused("open", opening(config()))
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    command.decide(ask.config, RUN, "approve", None)
    assert ask.refused("open", opening(config())).code == PENDING
    for beginning in ("012", "ffff", ""):
        with pytest.raises(ConfigError, match="no single run begins with"):
            command.decide(ask.config, beginning, "approve", None)


@pytest.mark.parametrize(
    ("mode", "changes", "waits"),
    [
        ("ask", {}, True),
        ("auto", {}, False),
        ("auto", {"seed": 7}, False),
        ("auto", {"rounds": 4}, True),
        ("auto", {"params": {"batch_size": 4}}, True),
        ("off", {"rounds": 4}, False),
    ],
)
def test_a_second_run_waits_unless_its_summary_is_equal(
    mode: str, changes: dict[str, Any], waits: bool, own: Hosts
) -> None:
    ask = own(approve=mode)
    if mode != "off":
        ask.refused("open", opening(config()))
        decided(ask)
    ask("open", opening(config()))
    second = opening(config(**changes), run="f" * 32)
    if waits:
        assert ask.refused("open", second).code == PENDING
    else:
        ask("open", second)


def test_a_public_data_set_needs_no_approval(hosts: Hosts) -> None:
    hosts(approve="ask")("open", opening())


def test_no_more_runs_wait_than_a_site_can_read(
    own: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "MOST_WAITING", 2)
    ask = own()
    codes = [ask.refused("open", opening(config(), run=digit * 32)).code for digit in "1231"]
    assert codes == [PENDING, PENDING, REFUSED, PENDING]


# -- the words -------------------------------------------------------------------------------------


def shown(ask: RunRequest, **changes: Any) -> str:
    ask.refused("open", opening(config(**changes)))
    found = approval.waiting(folder(ask), RUN)
    assert found is not None
    return found.text


def test_the_summary_says_what_is_sent_to_whom_and_how_often(own: Hosts) -> None:
    text = shown(own({"score": True, "looks": 30}), name="a plain project")
    for words in (
        "Method fedavg: A server averages weights. 3 rounds, 3 parties.",
        "Inputs: a, b, c. Label: kind, 2 classes.",
        "A model that is sent has at most 10 numbers (linear).",
        "Sent to the coordinator in a round:\n  update, once, at most 3 in all: ClientUpdate: "
        "train on own rows",
        "Sent to peers in a round: nothing.",
        "Privacy: no ε. What is sent is computed from rows, and may reveal rows.",
        "Weakness W1: the coordinator sees each message",
        '"batch_size": 8',
        "For hub, with the rows of wards",
        "Scores of models: yes, with noise, at most 30 in all runs; this run takes 4.",
    ):
        assert words in text
    assert "plain project" not in text and "W2" not in text


def test_the_summary_of_a_private_and_of_a_secure_run_differ(own: Hosts, tmp_path: Path) -> None:
    public = rows(tmp_path / "p.csv", 50, 9, labels=False)
    dp = {"batch_size": 8, "dp": {"sigma": 2.0}}
    values = json.loads(config()) | {"params": dp, "aggregate": {"secure": True}}
    values["method"] = "fedavg-dp"
    ask = own({"public": public, "epsilon": 3.0}, peers=["b", "c", "d", "e"], min_sum=3)
    ask.refused("open", opening(json.dumps(values), members={"1": "b", "2": "c"}))
    text = approval.waiting(folder(ask), RUN).text
    assert (
        "Only as part of a secure sum." in text
        and "Sums are of at least 3 of b, c, d, e, node." in text
    )
    assert (
        "Privacy: weights by this node's noise or its share of noise, δ = 1e-05" in text
        and "at most ε = 3 at δ = 1e-05" in text
    )
    assert "Weakness W6" in text and "W1" not in text


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_the_summary_has_the_most_that_a_private_run_spends(
    sigma: float, own: Hosts, tmp_path: Path
) -> None:
    public = rows(tmp_path / "p.csv", 50, 9, labels=False)
    params = {"batch_size": 100, "epochs": 1, "dp": {"sigma": sigma}}
    kind = run(method="fedavg-dp", models={"pool": ["linear"]}, params=params)
    ask = own({"public": public})
    text = for_nodes(build(kind, PrivateData(public=public))).model_dump_json()
    ask.refused("open", opening(text))
    shown = approval.waiting(folder(ask), RUN).text
    (line,) = [line for line in shown.splitlines() if line.startswith("This run's own ε")]
    assert "Notes: counts alone." in shown  # see `NodeRun.covered`
    assert (
        "for weights, with 60 training rows. All else, such as numbers of rows, has no noise."
        in line
    )
    decided(ask)
    ask("open", opening(text))
    party: Any = ask.host._node_runs[RUN].party
    assert len(party.data) == 60
    for t in range(3):
        weights = {k: torch.zeros_like(v) for k, v in party.params.items()}
        ask("do", doing(t, ask.host, round=t, shared={"t": t, "weights": weights}))
    spent = epsilon(ask.host.budget.spent("wards").all_releases(), 1e-5)
    claimed = float(line.split("at most ")[1].split()[0])
    assert spent <= claimed <= spent + 0.001


@pytest.mark.parametrize("min_rows", [10, 61])
def test_a_run_that_waits_tells_nothing_of_the_number_of_rows(
    min_rows: int, own: Hosts, tmp_path: Path
) -> None:
    """A coordinator could ask with other test rows again and again, before anybody reads the first
    request.
    """
    public = rows(tmp_path / "p.csv", 50, 9, labels=False)
    kind = run(
        method="fedavg-dp",
        models={"pool": ["linear"]},
        params={"batch_size": 100},
    )
    ask = own({"public": public, "epsilon": 50.0}, min_rows=min_rows)
    text = for_nodes(build(kind, PrivateData(public=public)))
    assert ask.refused("open", opening(text.model_dump_json())).code == PENDING
    few = (
        "This run cannot begin here: a run must train on at least 61 rows"
        in approval.waiting(folder(ask), RUN).text
    )
    assert few == (min_rows == 61)
    decided(ask)
    if few:
        assert "at least 61 rows" in ask.refused("open", opening(text.model_dump_json())).words
    else:
        ask("open", opening(text.model_dump_json()))


def test_no_run_with_sums_opens_in_a_folder_that_is_older_than_its_anchor(
    own: Hosts, tmp_path: Path
) -> None:
    """Its record of the questions that were answered in sums is as old."""
    secure = {"aggregate": {"secure": True}, "params": {"batch_size": 8, "clients_per_round": None}}
    how = {"approve": "off", "anchor": tmp_path / "anchor", "min_sum": 3, "peers": ["a", "b"]}
    text, ask = config(**secure), own(**how)
    begin = opening(text, members={"1": "a", "2": "b"})
    assert "--new-anchor" in ask.refused("open", begin).words
    ask.host.budget.begin_anchor()
    ask("open", begin)
    (ask.config.state / "budget.json").unlink()
    assert "older than its anchor" in own(**how).refused("open", begin).words


def test_the_numbers_of_a_model_are_those_that_are_sent(own: Hosts) -> None:
    models = {"pool": ["mlp-large"]}
    ask = own(approve="off")
    ask("open", opening(config(models=models)))
    count = sum(w.numel() for w in ask.host._node_runs[RUN].party.params.values())
    assert f"has at most {count:,} numbers (mlp-large)." in terms_of(method="fedavg", models=models)
    assert "A model" not in terms_of(method="fedboost", models={})


def terms_of(**changes: Any) -> str:
    kind = run(**{"params": {}, **changes})
    found, cfg, rounds, _ = resolve(kind, at_node=True)
    return terms(kind, found, cfg, rounds)


def test_no_text_of_the_coordinator_is_in_it_unescaped(own: Hosts, tmp_path: Path) -> None:
    values = json.loads(config())
    values["data"]["row_schema"]["columns"] = ["a", "b", "ok\x1b[2J\u202e"]
    ask = own({"keep": ["*"]})
    ask.refused("open", opening(json.dumps(values)))
    text = approval.waiting(folder(ask), RUN).text
    assert r"Inputs: a, b, ok\x1b[2J\u202e." in text and {
        c for c in text if not c.isprintable()
    } == {"\n"}


@pytest.mark.parametrize("name", sorted(registry()))
def test_each_method_has_terms_that_name_what_it_sends(name: str) -> None:
    method = registry()[name]
    data: dict[str, Any] = (
        {"clients": 3, "public_rows": 40} if method.setting == "horizontal" else {}
    )
    kind = run_of(name, data)
    found, cfg, rounds, _ = resolve(kind, at_node=True)
    text = terms(kind, found, cfg, rounds)
    names = [*found.client.CALLS, *found.client.TO_PEERS]
    sent = [line.split(",")[0].strip() for line in text.splitlines() if line.startswith("  ")]
    assert {*sent} <= {*names} and (sent or not names) and "its page does not say" not in text
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}


def weaknesses_of(name: str) -> set[str]:
    method = registry()[name]
    data: dict[str, Any] = (
        {"clients": 3, "public_rows": 40} if method.setting == "horizontal" else {}
    )
    kind = run_of(name, data)
    found, cfg, _, _ = resolve(kind, at_node=True)
    return {*weaknesses(kind, found, cfg)}


@pytest.mark.parametrize("secure", [False, True])
def test_the_epsilon_of_a_sum_is_said_to_hang_on_what_the_coordinator_says(secure: bool) -> None:
    """In secure sums noise is of shares, made for as many parties as the run says there are."""
    cfg = registry()["fedextra"].configure(
        params={"dp": {"sigma": 31.6, "grid": {"a": (0.0, 1.0)}}}
    )
    context = SimpleNamespace(aggregator=SimpleNamespace(secure=secure), parties=100)
    party: Any = SimpleNamespace(cfg=cfg, context=context, data=range(60))
    (line,) = own_epsilon(party, rounds=100)
    assert ("if 100 parties take part, as the coordinator says" in line) == secure
    assert ("may be charged more" in line) == secure


def test_the_terms_say_what_they_do_not_hold() -> None:
    kind = run_of("fedavg", {"clients": 3})
    found, cfg, rounds, _ = resolve(kind, at_node=True)
    text = terms(kind, found, cfg, rounds)
    assert "A page that is not fedloom's own may have more weaknesses than are listed." in text
    assert "Not in this text, and the coordinator's choice, also after an approval:" in text


def test_the_threat_model_and_the_summary_name_the_same_weaknesses() -> None:
    """Of methods that send counts or means by class, and of those whose messages other
    nodes get.
    """
    page = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text()
    table = [line.split(" | ") for line in page.splitlines() if re.match(r"\| [a-z ]+: `", line)]
    rows = {row[0].partition(":")[0][2:]: re.findall("`([a-z-]+)`", row[0]) for row in table}
    for name in rows["means by class"] + rows["sums over rows"]:
        assert "W7" in weaknesses_of(name), name
    for name in [*rows["among peers"], "fens", "exchange", "fedpcl", "fedhssl"]:
        assert "W3" in weaknesses_of(name), name
    kind = run_of("exchange", {"clients": 3})
    found, cfg, rounds, _ = resolve(kind, at_node=True)
    assert "Sent to the coordinator, which passes it on to the other nodes, in a round:" in terms(
        kind, found, cfg, rounds
    )
    assert not {"W3", "W7"} & weaknesses_of("fedavg")


def run_of(name: str, data: dict[str, Any]) -> Any:
    from fedloom.experiment.plan.reading import check

    values = {"method": name, "rounds": 30, "data": {"name": "digits", **data}}
    if "secure sums" in registry()[name].needs:
        values["aggregate"] = {"secure": True}
    return check({"run": values}).run


def test_nodes_that_were_shown_other_terms_have_no_sum_together(own: Hosts) -> None:
    """The terms are part of the name of every sum, which all masks and signatures depend on."""
    names = {}
    every: list[dict[str, Any]] = [{}, {"seed": 5}, {"rounds": 4}, {"params": {"batch_size": 4}}]
    for number, changes in enumerate(every):
        ask = own(approve="off", min_sum=3, peers=["peer", "other"])
        values = json.loads(config(**changes)) | {"aggregate": {"secure": True}}
        members = {"1": "peer", "2": "other"}
        ask("open", opening(json.dumps(values), start=number + 1, members=members))
        names[number] = ask.host._node_runs[RUN].sums._context.rpartition("/")[2]
    assert names[0] == names[1] and len({*names.values()}) == 3 and len(names[0]) == 64


# -- stopping --------------------------------------------------------------------------------------


def test_a_run_that_waits_can_be_refused_for_good_and_approved_later(own: Hosts) -> None:
    ask = own()
    ask.refused("open", opening(config()))
    decided(ask, "stop")
    assert ask.refused("open", opening(config())).code == STOPPED
    decided(ask)
    ask("open", opening(config()))


def test_a_stop_ends_the_work_under_way_and_every_further_call(
    own: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = own(approve="off")
    ask("open", opening(config()))
    ask("do", doing(0, ask.host))
    before = (ask.config.state / f"run-{RUN}" / "state").read_bytes()
    folder(ask).mkdir()
    seen = approval.WaitingRun(run=RUN, caller="hub", since="2026-11-26T10:00:00+00:00", text="")
    (folder(ask) / f"{RUN}.waiting").write_text(seen.model_dump_json())
    begun = threading.Event()

    def endless(*_: object, **__: object) -> None:
        begun.set()
        while True:
            pass

    monkeypatch.setattr(steps, "local_sgd", endless)
    body = doing(1, ask.host, round=1)

    async def stop() -> CallRefused:
        call = asyncio.ensure_future(ask.host.answer("hub", "do", body))
        await asyncio.to_thread(begun.wait)
        decided(ask, "stop")
        ask.host.stop_runs()
        with pytest.raises(CallRefused) as refusal:
            await call
        return refusal.value

    ask._loop.run_until_complete(stop())
    for kind, sent in (
        ("do", body),
        ("open", opening(config())),
        ("digest", which()),
        ("restore", which(round=0)),
    ):
        assert ask.refused(kind, sent).code == STOPPED
    assert [line["what"] for line in ask.audited()][-1] == "stopped"
    assert (ask.config.state / f"run-{RUN}" / "state").read_bytes() == before


# -- roles -----------------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path: Path) -> Callable[..., Credentials]:
    """Certificates of one CA, with roles; those of a node are its own."""
    authority = CertificateAuthority.create(tmp_path / "ca")

    def make(name: str, *roles: str, by: CertificateAuthority = authority) -> Credentials:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        certificate, key = by.issue(name, 30, roles)
        write(place / "certificate.pem", certificate)
        write(place / "key.pem", key, secret=True)
        ca = by.folder / "ca.pem"
        return Credentials(
            ca, place / "certificate.pem", place / "key.pem", by.folder / "revoked.pem"
        )

    return make


@pytest.fixture
def guarded(own: Hosts, people: Callable[..., Credentials], tmp_path: Path) -> RunRequest:
    """A host where the hub may submit, and one person may approve and stop."""
    people("node")
    files = {name: tmp_path / "node" / f"{name}.pem" for name in ("certificate", "key")}
    files |= {name: tmp_path / "ca" / f"{name}.pem" for name in ("ca", "revoked")}
    roles = {"hub": ["submit"], "dr-weber": ["approve", "stop"], "auditor": ["audit"]}
    return own(insecure=False, roles=roles, **files)


def opens(ask: RunRequest, roles: tuple[str, ...] = ("submit",)) -> str:
    """The code of the refusal to open; "" if it is opened."""
    try:
        ask._loop.run_until_complete(ask.host.answer("hub", "open", opening(config()), roles))
    except CallRefused as refusal:
        return refusal.code
    return ""


def test_who_submits_needs_the_role_in_both_places(guarded: RunRequest, own: Hosts) -> None:
    assert opens(guarded, ()) == REFUSED and opens(guarded, ("approve",)) == REFUSED
    assert opens(guarded) == PENDING
    with pytest.raises(CallRefused, match="role submit"):
        guarded._loop.run_until_complete(
            guarded.host.answer("second", "open", opening(config()), ("submit",))
        )


def test_an_approval_counts_by_its_signature_and_role_alone(
    guarded: RunRequest, people: Callable[..., Credentials], tmp_path: Path
) -> None:
    assert opens(guarded) == PENDING
    state, found = guarded.config.state, approval.find(guarded.config.state, RUN)
    foreign = CertificateAuthority.create(tmp_path / "foreign")
    for signer in (
        None,
        people("dr-weber"),  # without the role
        people("dr-klein", "approve"),  # node.toml does not name
        people("dr-weber", "approve", by=foreign),
    ):
        approval.decide(state, found, "approve", signer)
        assert opens(guarded) == PENDING
    weber = people("dr-weber", "approve")
    made = approval.decide(state, found, "approve", weber)
    path = folder(guarded) / f"{RUN}.decision"
    for changes in (
        {"run": "f" * 32},
        {"sha256": "0" * 64},
        {"what": "stop"},
        {"by": "hub"},
        {"signature": "zz"},
    ):
        path.write_text(made.model_copy(update=changes).model_dump_json())
        assert opens(guarded) == PENDING
    path.write_text(made.model_dump_json())
    assert opens(guarded) == ""
    assert [line["by"] for line in guarded.audited() if line["what"] == "approved"] == ["dr-weber"]
    approval.decide(state, found, "stop", weber)  # the certificate has approve only
    assert opens(guarded) == ""
    approval.decide(state, found, "stop", people("dr-weber", "stop"))
    assert opens(guarded) == STOPPED


def test_a_command_needs_the_certificate_that_node_toml_asks_for(
    guarded: RunRequest, people: Callable[..., Credentials], sure: None, tmp_path: Path
) -> None:
    assert opens(guarded) == PENDING
    with pytest.raises(
        ConfigError,
        match="give --as with the folder of the certificate of dr-weber, who may approve",
    ):
        command.decide(guarded.config, RUN, "approve", None)
    people("dr-weber", "stop")
    with pytest.raises(
        ConfigError, match=r"dr-weber may not approve here.*request one with --role approve"
    ):
        command.decide(guarded.config, RUN, "approve", tmp_path / "dr-weber")
    people("dr-weber", "approve", "stop")
    command.decide(guarded.config, RUN, "approve", tmp_path / "dr-weber")
    assert opens(guarded) == ""


def test_a_stop_outlives_the_certificate_of_who_stopped(
    guarded: RunRequest, people: Callable[..., Credentials], tmp_path: Path
) -> None:
    assert opens(guarded) == PENDING
    found = approval.find(guarded.config.state, RUN)
    approval.decide(guarded.config.state, found, "stop", people("dr-weber", "stop"))
    assert opens(guarded) == STOPPED
    CertificateAuthority(tmp_path / "ca").revoke("dr-weber")
    assert opens(guarded) == STOPPED
    approval.decide(guarded.config.state, found, "approve", people("dr-weber", "approve"))
    assert opens(guarded) == ""


def test_an_auditor_signs_the_newest_line_and_a_log_that_is_replaced_lacks_it(
    guarded: RunRequest,
    people: Callable[..., Credentials],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert opens(guarded) == PENDING
    state, path = guarded.config.state, guarded.config.state / "audit.jsonl"
    with pytest.raises(ConfigError, match="who may audit"):
        command.confirm(guarded.config, None)
    approval.confirm(state, "0" * 64, people("dr-weber", "audit"))  # node.toml does not name for it
    guarded.host.stop_runs()
    people("auditor", "audit")
    command.confirm(guarded.config, tmp_path / "auditor")
    newest = capsys.readouterr().out.split()[-1]
    guarded.host.stop_runs()
    guarded.host.stop_runs()
    lines = [line for line in guarded.audited() if line["what"] == "confirmed"]
    assert [(line["caller"], line["newest"]) for line in lines] == [("auditor", newest)]
    key: Any = x509.load_pem_x509_certificate(
        (tmp_path / "auditor" / "certificate.pem").read_bytes()
    ).public_key()
    assert [(name, its) for name, _, its in verify(state).confirmed] == [
        ("auditor", fingerprint(key))
    ]
    first, *others = path.read_text().splitlines()
    chain = [first.replace("coordinator", "somebody").replace("hub", "somebody"), *others]
    for number in range(1, len(chain)):  # the whole chain is written again
        line = json.loads(chain[number])
        chain[number] = json.dumps({**line, "before": sha256(chain[number - 1])})
    path.write_text("\n".join([*chain, ""]))
    with pytest.raises(CheckpointError, match="'auditor' has not confirmed the lines before it"):
        verify(state)
    line = json.loads(chain[-1])
    forged = {
        **line,
        "newest": line["before"],
        "decision": {**line["decision"], "sha256": line["before"]},
    }
    # what was signed is another hash
    path.write_text("\n".join([*chain[:-1], json.dumps(forged), ""]))
    with pytest.raises(CheckpointError, match="'auditor' has not confirmed the lines before it"):
        verify(state)


def test_the_insecure_mode_has_no_roles(own: Hosts) -> None:
    with pytest.raises(ValueError, match="nobody has a role"):
        own(roles={"hub": ["submit"]})


# -- what may leave --------------------------------------------------------------------------------


def update(ask: RunRequest, call: int = 0) -> Any:
    head, rest = payload.unpack(ask("do", doing(call, ask.host, round=call)))
    return payload.decoded(rest, head["lines"][0]["reply"])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"names": ["weights"]}, "no part 'rows' of a reply"),
        ({"names": ["w*"]}, "no part 'rows' of a reply"),
        ({"numbers": 3}, "at most 3 numbers in a reply"),
        ({"megabytes": 1e-5}, "a run at most 1e-05 MB"),
    ],
)
def test_a_reply_is_refused_by_its_names_and_size(
    limits: dict[str, Any], words: str, own: Hosts
) -> None:
    ask = own(approve="off", outgoing=limits)
    ask("open", opening(config()))
    refusal = ask.refused("do", doing(0, ask.host))
    assert refusal.code == REFUSED and words in refusal.words


def test_a_run_s_bytes_are_counted_over_restarts(own: Hosts) -> None:
    ask = own(approve="off")
    ask("open", opening(config()))
    found = update(ask)
    size = sum(x.numel() * x.element_size() for x in [*found["weights"].values()])
    limits = {"megabytes": 2.5 * size / 1e6, "names": ["weights", "rows"], "numbers": 1000}
    ask = own(approve="off", outgoing=limits)
    ask("open", opening(config(), start=2))
    body = doing(0, ask.host, start=2)
    assert ask("do", body) == ask("do", body)  # a reply that is sent again counts once
    again = own(approve="off", outgoing=limits)
    again("open", opening(config(), start=3))
    again("do", doing(0, again.host, start=3))
    assert "a run at most" in again.refused("do", doing(1, again.host, start=3, round=1)).words


def test_numbers_are_clipped_before_they_leave(own: Hosts, tmp_path: Path) -> None:
    ask = own(approve="off", outgoing={"clip": 1e-3})
    ask("open", opening(config()))
    found: Any = update(ask)
    assert all(x.abs().max() <= 1e-3 for x in found["weights"].values()) and found["rows"] > 20
    inf = float("inf")
    sent: Any = OutgoingFilter(Outgoing(clip=2.0), tmp_path)(
        {"x": torch.tensor([inf, -inf, 1.0]), "n": torch.tensor(9)}
    )
    assert sent["x"].tolist() == [2.0, -2.0, 1.0] and sent["n"] == 9
