"""Secure sums at nodes with certificates: the loop's bits, whoever is lost at any step; and who
lies is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedloom.api import execute
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import check
from fedloom.protect.masks import unmasked
from fedloom.remote import certs, rpc_errors, secure_sum
from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.masking import SumKeeper
from fedloom.remote.rpc_errors import CallRefused
from tests.net.nodes import federation
from tests.net.processes import identity
from tests.net.test_faults import same
from tests.node.hosts import RunRequest, config, doing, opening

FILES = ("ca", "certificate", "key")
NODES = [f"node-{k}" for k in range(4)]
STEPS = ["keys", "shares", "deliver", "agree", "open"]


def files(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.pem" for name in FILES}


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four nodes with certificates; the coordinator's file."""
    folder = tmp_path_factory.mktemp("certs")
    CertificateAuthority.create(folder)
    for name in ("coordinator", *NODES):
        identity(folder, name)
    with federation(
        tmp_path_factory.mktemp("four"), 4, lambda name: {"insecure": False, **files(folder / name)}
    ) as (
        path,
        _,
    ):
        own = "\n".join(
            f'{name} = "{file}"' for name, file in files(folder / "coordinator").items()
        )
        path.write_text(path.read_text().replace("insecure = true", own))
        yield path


def run_of(rounds: int = 2, **changes: Any) -> RunConfig:
    values = {
        "method": "fedavg",
        "rounds": rounds,
        "data": {"clients": 4, "public_rows": 40, "test_rows": 60, "own_test_rows": 10},
        "models": {"pool": ["linear"], "norm": "none"},
        "aggregate": {"secure": True},
        **changes,
    }
    return check({"run": values}).run


def at(run: RunConfig, path: Path) -> Any:
    net = run.engine.model_copy(update={"name": "net", "federation": str(path)})
    return execute(run.model_copy(update={"engine": net}))


def test_the_sum_at_nodes_has_the_loop_s_bits(field: Path) -> None:
    run = run_of()
    same(at(run, field).summary, execute(run).summary)


OTHERS: dict[str, dict[str, Any]] = {
    "fedmd": {},
    "augfl": {},
    "fedboost": {"depth": 2, "bins": 8},
    "fedforest": {"depth": 2, "bins": 8, "lot": 2},
    "fedextra": {"depth": 2, "bins": 8},
    "fedglm": {"l2": 1.0},
    "stats": {},
}


@pytest.mark.each_time("augfl", "fedboost")
@pytest.mark.parametrize("method", OTHERS)
def test_so_have_other_pages(method: str, field: Path) -> None:
    run = run_of(method=method, params=OTHERS[method])
    same(at(run, field).summary, execute(run).summary)


def test_so_have_priors_of_nodes_beside_those_of_the_active_party(field: Path) -> None:
    params = {"steps": 2, "epochs": 1}
    run = run_of(1, method="proto-evfl", params=params, data={"clients": 5, "test_rows": 50})
    same(at(run, field).summary, execute(run).summary)


def test_also_where_replies_are_lost_or_not_finite(field: Path) -> None:
    run = run_of(6, faults={"dropout": 0.1, "nan": 0.1, "late": 0.05}, seed=3)
    here, there = execute(run), at(run, field)
    assert here.summary["failures"] > 2
    same(there.summary, here.summary)


@pytest.fixture
def lost_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Lets some nodes be unreachable from a step on."""
    take = SumKeeper.step

    def lose(step: str, count: int) -> None:
        def step_or_not(keeper: SumKeeper, request: Any, rest: Any) -> bytes:
            if request["step"] == step and keeper._own in NODES[:count]:
                raise CallRefused(rpc_errors.UNREACHABLE, "gone")
            return take(keeper, request, rest)

        monkeypatch.setattr(SumKeeper, "step", step_or_not)

    return lose


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_is_lost_at_any_step_does_not_stop_the_sum(
    step: str, field: Path, lost_at: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors: list[dict[str, np.ndarray]] = []
    whole = unmasked

    def seen(keys: Any, shared: Any, masked: dict[str, np.ndarray], *more: Any) -> np.ndarray:
        vectors.append(masked)
        return whole(keys, shared, masked, *more)

    monkeypatch.setattr(secure_sum, "unmasked", seen)
    lost_at(step, 1)
    seed = STEPS.index(step) + 10  # nodes answer one question in one set of nodes, over all runs
    found = at(run_of(1, seed=seed), field)
    arrived = NODES if step in ("agree", "open") else NODES[1:]
    assert sorted(vectors[0]) == arrived
    assert found.summary["failures"] == len(NODES) - len(arrived)
    alike = execute(run_of(1, seed=seed, faults={} if arrived == NODES else {"dropout": 0.0}))
    if arrived == NODES:
        assert found.summary["state_sha256"] == alike.summary["state_sha256"]
    # What the coordinator got: nothing but numbers of all sizes, as of no model
    tops = np.concatenate([y >> np.uint64(56) for y in vectors[0].values()])
    counts = np.bincount(tops.astype(np.int64), minlength=256)
    assert counts.max() < 4 * counts.mean() and (counts > 0).sum() > 250


@pytest.mark.parametrize("step", ["keys", "shares", "agree", "open"])
def test_below_the_threshold_there_is_no_sum_and_the_run_is_reported(
    step: str, field: Path, lost_at: Callable[[str, int], None]
) -> None:
    lost_at(step, 2)
    assert at(run_of(1), field).summary["failures"] >= 1


@pytest.mark.parametrize("step", ["keys", "list"])
def test_a_sum_that_needs_all_nodes_takes_three_calls_and_is_none_if_one_is_lost(
    step: str, field: Path, lost_at: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    take = SumKeeper.step

    def seen(keeper: SumKeeper, request: Any, rest: Any) -> bytes:
        steps.append(request["step"])
        return take(keeper, request, rest)

    monkeypatch.setattr(SumKeeper, "step", seen)
    whole = at(
        run_of(1, method="stats", data={"name": "breast_cancer", "clients": 4, "test_rows": 60}),
        field,
    )
    assert (
        {*steps} == {"keys", "list"} and len(steps) == 5 * 2 * 4 and whole.summary["failures"] == 0
    )
    lost_at(step, 1)
    some = {"name": "breast_cancer", "clients": 4, "test_rows": 50}
    found = at(run_of(1, method="stats", data=some, seed=["keys", "list"].index(step)), field)
    assert found.summary["failures"] >= 1 and not found.summary.get("learned")


def test_a_node_sends_no_single_reply_where_the_run_is_secure(tmp_path: Path) -> None:
    from tests.node.hosts import node

    ask = RunRequest(node(tmp_path, peers=["a", "b"], min_sum=3))
    try:
        ask("open", opening(config(**{"aggregate.secure": True}), members={"1": "a", "2": "b"}))
        refusal = ask.refused("do", doing(0, ask.host))
        assert "as part of a sum only" in refusal.words
        unknown = ask.refused("do", doing(0, ask.host, mask={"sum": "x", "weight": "rows"}))
        assert unknown.code == rpc_errors.MALFORMED
        ask("open", opening(config(**{"aggregate.secure": False}), start=2))
    finally:
        ask.close()


# -- signatures ------------------------------------------------------------------------------------


def test_signatures_are_those_of_valid_certificates_of_this_ca(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "ca")
    for name in ("a", "b"):
        identity(tmp_path / "ca", name)
    a, b = (Credentials(**files(tmp_path / "ca" / name)) for name in "ab")
    sent = a.sign(b"text")
    assert b.signed("a", a.shown, b"text", sent)
    assert not b.signed("a", a.shown, b"other", sent)
    assert not b.signed("b", a.shown, b"text", sent) and not b.signed("a", b.shown, b"text", sent)
    assert not b.signed("a", b"", b"text", sent) and not b.signed("a", a.shown, b"text", b"")
    stranger = CertificateAuthority.create(tmp_path / "other")
    identity(tmp_path / "other", "a", None)
    c = Credentials(**files(tmp_path / "other" / "a"))
    assert stranger is not authority and not b.signed("a", c.shown, b"text", c.sign(b"text"))


def test_a_node_s_certificate_signs_no_other_certificate(tmp_path: Path) -> None:
    """A chain of two: its own certificate as if it were a CA's, below it one with
    another's name.
    """
    CertificateAuthority.create(tmp_path / "ca")
    for name in ("a", "b"):
        identity(tmp_path / "ca", name)
    a, b = (Credentials(**files(tmp_path / "ca" / name)) for name in "ab")
    issuer = x509.load_pem_x509_certificate(b.shown)
    key = load_pem_private_key(b.key.read_bytes(), None)
    forged_key = ec.generate_private_key(ec.SECP256R1())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    named = x509.SubjectAlternativeName([x509.DNSName("a")])
    forged = (
        certs._certificate(
            x509.Name([]), issuer.subject, forged_key.public_key(), issuer.not_valid_after_utc
        )
        .add_extension(named, critical=False)
        .sign(key, SHA256())
    )
    chain = forged.public_bytes(Encoding.PEM) + b.shown
    assert not a.signed("a", chain, b"text", forged_key.sign(b"text", ec.ECDSA(SHA256())))


@pytest.mark.parametrize("kind", ["rsa", "ed25519"])
def test_other_keys_sign_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = CertificateAuthority.create(tmp_path)
    key: Any = (
        rsa.generate_private_key(65537, 2048)
        if kind == "rsa"
        else ed25519.Ed25519PrivateKey.generate()
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")])
    ends = authority.certificate.not_valid_after_utc
    made = (
        certs._certificate(subject, authority.certificate.subject, key.public_key(), ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a")]), critical=False)
        .sign(authority._key, SHA256())
    )
    (tmp_path / "certificate.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(certs._pem(key))
    (tmp_path / "key.pem").chmod(0o600)
    a = Credentials(**files(tmp_path))
    assert a.signed("a", a.shown, b"text", a.sign(b"text")) and not a.signed(
        "a", a.shown, b"t", a.sign(b"text")
    )
