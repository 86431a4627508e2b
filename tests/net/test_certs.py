"""Certificates: who one is, whom one believes, and what `fedloom certs` writes."""

from __future__ import annotations

import asyncio
import importlib
import io
import logging
import os
import re
import stat
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from rich.console import Console

import fedloom.remote
from fedloom.cli.federation import certs, revoke
from fedloom.core.errors import ConfigError, EngineError, FedloomError
from fedloom.remote import certs as authorities
from fedloom.remote import credentials
from fedloom.remote.certs import CertificateAuthority, write
from fedloom.remote.credentials import Credentials, endpoint
from fedloom.remote.node.config import read as read_node


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "fed")


def holder(
    authority: CertificateAuthority, name: str, days: float = 3, folder: str = ""
) -> Credentials:
    """Give a name a certificate, and open it."""
    place = authority.folder / (folder or name)
    place.mkdir(exist_ok=True)
    certificate, key = authority.issue(name, days)  # type: ignore[arg-type]
    write(place / "certificate.pem", certificate)
    write(place / "key.pem", key, secret=True)
    return opened(authority, place)


def opened(authority: CertificateAuthority, place: Path) -> Credentials:
    return Credentials(
        authority.folder / "ca.pem",
        place / "certificate.pem",
        place / "key.pem",
        authority.folder / "revoked.pem",
    )


def context(credentials: Credentials) -> dict[str, list[bytes]]:
    """What gRPC tells a server about a caller."""
    return {
        "x509_pem_cert": [credentials.certificate.read_bytes()],
        "x509_common_name": [b"somebody else"],
    }


@asynccontextmanager
async def served(credentials: Credentials) -> AsyncIterator[str]:
    """A gRPC server that tells its callers their names."""

    async def who(_: bytes, context: Any) -> bytes:
        return (credentials.caller(context.auth_context()) or "nobody").encode()

    server = grpc.aio.server()
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", credentials.server())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(address: str, secure: grpc.ChannelCredentials, name: str) -> str:
    """What the server there calls us, or the status of the refusal."""
    options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(address, secure, options) as channel:
        try:
            return (await channel.unary_unary("/test/Who")(b"", timeout=60)).decode()
        except grpc.aio.AioRpcError as error:
            return error.code().name


def test_both_ends_know_each_other_by_their_certificates(authority: CertificateAuthority) -> None:
    server, caller = holder(authority, "hospital-a"), holder(authority, "coordinator")
    assert (server.name, caller.name) == ("hospital-a", "coordinator")

    async def calls() -> list[str]:
        async with served(server) as address:
            good = await ask(address, caller.channel(), "hospital-a")
            return [good, await ask(address, caller.channel(), "hospital-b")]

    assert asyncio.run(calls()) == ["coordinator", "UNAVAILABLE"]


def test_who_has_no_certificate_of_the_ca_does_not_get_in(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    server = holder(authority, "hospital-a")
    stranger = holder(CertificateAuthority.create(tmp_path / "other"), "coordinator")

    async def calls() -> list[str]:
        async with served(server) as address:
            believing = grpc.ssl_channel_credentials(
                server.ca.read_bytes(), stranger.key.read_bytes(), stranger.certificate.read_bytes()
            )
            nameless = grpc.ssl_channel_credentials(server.ca.read_bytes())
            return [
                await ask(address, secure, "hospital-a")
                for secure in (stranger.channel(), believing, nameless)
            ]

    assert asyncio.run(calls()) == ["UNAVAILABLE"] * 3


def test_a_caller_is_nobody_without_a_certificate_or_out_of_its_time(
    authority: CertificateAuthority,
) -> None:
    me = holder(authority, "hospital-a")
    assert me.caller({}) is None
    assert me.caller({"x509_pem_cert": [b"nonsense"]}) is None
    late, _ = authority.issue("late", -0.02)  # type: ignore[arg-type]
    assert me.caller({"x509_pem_cert": [late]}) is None
    assert me.caller(context(holder(authority, "coordinator"))) == "coordinator"


def test_a_certificate_without_dns_names_counts_by_its_common_name(
    authority: CertificateAuthority,
) -> None:
    key: Any = load_pem_private_key((authority.folder / "ca.key").read_bytes(), None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "plain")])
    ends = authority.certificate.not_valid_after_utc
    made = authorities._certificate(name, authority.certificate.subject, key.public_key(), ends)
    pem = made.sign(key, SHA256()).public_bytes(Encoding.PEM)
    assert holder(authority, "hospital-a").caller({"x509_pem_cert": [pem]}) == "plain"


def test_a_revoked_caller_is_nobody_as_soon_as_the_list_changes(
    authority: CertificateAuthority,
) -> None:
    me, other = holder(authority, "hospital-a"), holder(authority, "hospital-b")
    assert me.caller(context(other)) == "hospital-b"
    assert authority.revoke("hospital-b") == 1
    assert me.caller(context(other)) is None
    assert me.caller(context(me)) == "hospital-a"
    assert authority.revoke("hospital-b") == 0
    again = holder(authority, "hospital-b", folder="again")
    assert me.caller(context(again)) == "hospital-b"
    assert me.caller(context(other)) is None


def test_a_damaged_or_foreign_list_changes_nothing_and_is_logged(
    authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    me, other, third = (
        holder(authority, name) for name in ("hospital-a", "hospital-b", "hospital-c")
    )
    authority.revoke("hospital-b")
    assert me.caller(context(other)) is None
    assert me.revoked is not None
    foreign = CertificateAuthority.create(tmp_path / "foreign").folder / "revoked.pem"
    for bad in (b"torn", foreign.read_bytes()):
        write(me.revoked, bad)
        assert me.caller(context(other)) is None
        assert me.caller(context(third)) == "hospital-c"
        assert "stays in force" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match=r"revoked\.pem is n"):
            opened(authority, me.certificate.parent)
    me.revoked.unlink()
    assert me.caller(context(other)) is None


def test_a_server_can_be_checked_and_pinned_before_a_channel_opens(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    server, caller = holder(authority, "hospital-a"), holder(authority, "coordinator")
    stranger = holder(CertificateAuthority.create(tmp_path / "other"), "coordinator")
    twin = holder(authority, "hospital-a", folder="twin")

    async def calls() -> None:
        async with served(server) as address:
            shown = await caller.check_server(address, "hospital-a")
            assert shown == server.certificate.read_bytes()
            assert await ask(address, caller.channel(shown), "hospital-a") == "coordinator"
            assert (
                await ask(address, caller.channel(twin.certificate.read_bytes()), "hospital-a")
                == "UNAVAILABLE"
            )
            with pytest.raises(
                EngineError, match=r"hospital-b: Hostname mismatch.*; correct the name .*\.toml"
            ):
                await caller.check_server(address, "hospital-b")
            with pytest.raises(
                EngineError,
                match=r"not trusted as hospital-a: .*; its certificate is from another CA",
            ):
                await stranger.check_server(address, "hospital-a")
            authority.revoke("hospital-a")
            with pytest.raises(
                EngineError, match="is not trusted as hospital-a: certificate revoked"
            ):
                await caller.check_server(address, "hospital-a")
        with pytest.raises(EngineError, match="does not answer"):
            await caller.check_server(address, "hospital-a")

    asyncio.run(calls())


def test_files_that_are_torn_or_gone_later_change_nothing_for_who_connects(
    authority: CertificateAuthority,
) -> None:
    server, caller = holder(authority, "hospital-a"), holder(authority, "coordinator")
    fallen = holder(authority, "hospital-b")
    authority.revoke("hospital-b")
    assert caller.caller(context(fallen)) is None and caller.revoked is not None

    async def calls() -> None:
        async with served(server) as address, served(fallen) as other:
            for change in (lambda file: write(file, b"torn"), Path.unlink):
                for file in (caller.revoked, caller.certificate, caller.key):
                    change(file)
                assert (
                    await caller.check_server(address, "hospital-a")
                    == server.certificate.read_bytes()
                )
                with pytest.raises(
                    EngineError, match="is not trusted as hospital-b: certificate revoked"
                ):
                    await caller.check_server(other, "hospital-b")

    asyncio.run(calls())


def test_a_list_that_is_old_or_another_ca_s_is_reported(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    me, other = holder(authority, "hospital-a"), CertificateAuthority.create(tmp_path / "other")
    found, stranger = me._list, holder(other, "hospital-b")
    assert (
        found is not None and found.against(credentials._shown(me.certificate.read_bytes())) == ""
    )
    assert "have different CAs" in found.against(
        credentials._shown(stranger.certificate.read_bytes())
    )
    found.ends = datetime(2020, 1, 2, tzinfo=UTC)
    assert "expired on 2020-01-02" in found.against(credentials._shown(me.certificate.read_bytes()))
    assert me.caller(context(me)) is None


@pytest.mark.parametrize("address", ["x" * 70 + ".example:1", "..:1", "a\0b:1"])
def test_what_is_no_address_is_reported(authority: CertificateAuthority, address: str) -> None:
    with pytest.raises(EngineError, match="is not a valid address"):
        asyncio.run(holder(authority, "coordinator").check_server(address, "hospital-a"))


def test_credentials_say_what_is_wrong_with_their_files(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = holder(authority, "hospital-a")
    place = good.certificate.parent
    with pytest.raises(ConfigError, match=r"missing\.pem cannot be read"):
        Credentials(good.ca, good.certificate, tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match="not a PEM certificate"):
        Credentials(good.key, good.certificate, good.key)
    with pytest.raises(ConfigError, match="not a PEM key"):
        Credentials(good.ca, good.certificate, good.certificate)
    with pytest.raises(ConfigError, match="is not the key of"):
        Credentials(good.ca, good.certificate, holder(authority, "hospital-b").key)
    with pytest.raises(ConfigError, match="is not signed by the CA"):
        Credentials(
            CertificateAuthority.create(tmp_path / "other").folder / "ca.pem",
            good.certificate,
            good.key,
        )
    secret = load_pem_private_key(good.key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    write(place / "locked.pem", secret, secret=True)
    with pytest.raises(ConfigError, match="has a password"):
        Credentials(good.ca, good.certificate, place / "locked.pem")
    weak = rsa.generate_private_key(65537, 1024)
    monkeypatch.setattr(ec, "generate_private_key", lambda _: weak)
    with pytest.raises(ConfigError, match=r"rejects .* \(.*KEY_TOO_SMALL\)"):
        holder(authority, "hospital-c")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="expired on"):
        holder(authority, "hospital-c", days=-0.02)
    monkeypatch.setattr(authorities, "_AGO", timedelta(hours=-1))
    with pytest.raises(ConfigError, match="check the clock"):
        holder(authority, "hospital-d")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_key_that_others_can_read_is_warned_of(
    authority: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    good = holder(authority, "hospital-a")
    assert not caplog.records
    good.key.chmod(0o644)
    opened(authority, good.key.parent)
    assert "can be read by others" in caplog.text


def test_a_chain_of_the_user_pki_is_followed(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """The certificate's file may hold the authorities between it and the CA."""
    root_key: Any = load_pem_private_key((authority.folder / "ca.key").read_bytes(), None)
    below = CertificateAuthority.create(tmp_path / "below")
    key: Any = below.certificate.public_key()
    middle = (
        authorities._certificate(
            below.certificate.subject,
            authority.certificate.subject,
            key,
            below.certificate.not_valid_after_utc,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root_key, SHA256())
    )
    leaf = holder(below, "hospital-a")
    with pytest.raises(ConfigError, match="is not signed by the CA"):
        Credentials(authority.folder / "ca.pem", leaf.certificate, leaf.key)
    write(leaf.certificate, leaf.certificate.read_bytes() + middle.public_bytes(Encoding.PEM))
    assert Credentials(authority.folder / "ca.pem", leaf.certificate, leaf.key).name == "hospital-a"


def test_addresses() -> None:
    assert endpoint("a.example:7443") == ("a.example", 7443)
    assert endpoint("[::1]:7443") == ("::1", 7443)
    assert endpoint("unix:/run/s") == "/run/s"
    for bad in ("a.example", ":7443", "a:0", "a:x", "a:70000"):
        with pytest.raises(ConfigError, match="host:port"):
            endpoint(bad)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(EngineError, match=r"pip install -e '.\[net\]'"):
        importlib.reload(fedloom.remote)


def make(folder: Path, *names: str, **options: Any) -> str:
    """`fedloom certs`, and what it prints."""
    out = io.StringIO()
    certs(
        names,
        folder,
        ["fedal", "gossip"],
        Console(file=out, width=200),
        **{"here": True, **options},
    )
    return out.getvalue()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_certs_makes_everything_that_a_federation_needs(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    told = make(folder, "hospital-a", "hospital-b")
    assert "hospital-b" in told and "ca.key to yourself" in told
    node = read_node(folder / "hospital-b" / "node.toml")
    assert (node.name, node.peers) == ("hospital-b", ("hospital-a",))
    assert node.callers == {"coordinator": ("127.0.0.1:7443",)} and set(node.methods) == {
        "fedal",
        "gossip",
    }
    assert node.credentials is not None and node.credentials.name == "hospital-b"
    federation = tomllib.loads((folder / "federation.toml").read_text())
    assert federation["nodes"] == [{"name": "hospital-a"}, {"name": "hospital-b"}]
    assert federation["listen"] == "127.0.0.1:7443"
    files = [folder / federation[name] for name in ("ca", "certificate", "key", "revoked")]
    assert Credentials(*files).name == "coordinator"
    if os.name != "nt":
        assert {mode(key) for key in [*folder.glob("*/key.pem"), folder / "ca.key"]} == {0o600}
        assert {
            mode(place) for place in (folder, *(p for p in folder.iterdir() if p.is_dir()))
        } == {0o700}


def test_nodes_can_be_added_and_existing_files_stays(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    make(folder, "hospital-a", "hospital-b")
    mine = folder / "hospital-a" / "node.toml"
    mine.write_text(mine.read_text() + "# mine\n")
    federation = folder / "federation.toml"
    federation.write_text(federation.read_text() + "# mine too\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told = make(folder, "hospital-c", address="c.example:9000")
    assert "Add hospital-c to peers in node.toml of hospital-a, hospital-b" in told
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed == {"federation.toml", "issued.csv", "revoked.pem"}
    assert "# mine too" in federation.read_text()
    nodes = tomllib.loads(federation.read_text())["nodes"]
    assert nodes[2] == {"name": "hospital-c"}
    node = read_node(folder / "hospital-c" / "node.toml")
    assert node.callers == {"coordinator": ("c.example:9000",)} and node.peers == (
        "hospital-a",
        "hospital-b",
    )
    make(folder, "hospital-d")
    assert tomllib.loads(federation.read_text())["nodes"][3] == {"name": "hospital-d"}
    assert read_node(folder / "hospital-d" / "node.toml").credentials is not None


def test_renewing_gives_new_certificates_and_keeps_configs(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    make(folder, "hospital-a")
    names = "hospital-a", "coordinator"
    old = {name: (folder / name / "certificate.pem").read_bytes() for name in names}
    configs = {path: path.read_bytes() for path in folder.rglob("*.toml")}
    make(folder, *names, renew=True)
    for name in names:
        place = folder / name
        assert (place / "certificate.pem").read_bytes() != old[name]
        assert (
            Credentials(place / "ca.pem", place / "certificate.pem", place / "key.pem").name == name
        )
    assert {path: path.read_bytes() for path in folder.rglob("*.toml")} == configs
    authority = CertificateAuthority(folder)
    assert authority.revoke("hospital-a") == 2  # the old one too


def test_revoking_reaches_every_folder_here(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    make(folder, "hospital-a", "hospital-b")
    node = read_node(folder / "hospital-a" / "node.toml").credentials
    shown = {"x509_pem_cert": [(folder / "hospital-b" / "certificate.pem").read_bytes()]}
    assert node is not None and node.caller(shown) == "hospital-b"
    out = io.StringIO()
    revoke(["hospital-b"], folder, Console(file=out, width=200))
    assert "hospital-b: 1 certificate revoked" in out.getvalue()
    assert node.caller(shown) is None
    assert len({path.read_bytes() for path in folder.rglob("revoked.pem")}) == 1
    with pytest.raises(ConfigError, match="'hospital-x' has no certificate"):
        revoke(["hospital-a", "hospital-x"], folder, Console(file=io.StringIO()))
    assert (
        node.caller({"x509_pem_cert": [(folder / "hospital-a" / "certificate.pem").read_bytes()]})
        == "hospital-a"
    )


def test_a_folder_without_a_ca_has_nothing_to_renew(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no certificate of hospital-a to renew"):
        make(tmp_path / "fed", "hospital-a", renew=True)
    assert not (tmp_path / "fed").exists()


def test_what_was_issued_shows_what_was_revoked_since_when(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    make(folder, "hospital-a", "hospital-b")
    authority, path = CertificateAuthority(folder), folder / "issued.csv"
    authority.revoke("hospital-b")
    (taken_back,) = (one for one in authority.issued() if one.revoked)
    assert taken_back.name == "hospital-b" and re.fullmatch(r"\d{4}-\d\d-\d\d", taken_back.revoked)
    new = path.read_text()
    old = [line.rpartition(",")[0] for line in new.splitlines()]  # as earlier versions wrote it
    path.write_text("\n".join(old) + "\n")
    assert old[0] == "name,serial,ends" and not any(one.revoked for one in authority.issued())
    make(folder, "hospital-b", renew=True)
    assert path.read_text().startswith(new)
    assert [bool(one.revoked) for one in authority.issued() if one.name == "hospital-b"] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ((), {}, "give the names of the nodes"),
        (("Hospital",), {}, "lower-case"),
        (("../up",), {}, "lower-case"),
        (("ca.key",), {}, "lower-case"),
        (("new", "new"), {}, "a name of its own"),
        (("coordinator",), {}, "remove coordinator from the names"),
        (("hospital-a",), {}, "--renew"),
        (("moved",), {}, "--renew"),
        (("hospital-a", "hospital-q"), {"renew": True}, "no certificate of hospital-q to renew"),
        (("new",), {"days": 0}, "days"),
        (("new",), {"address": "a"}, "host:port"),
        (("new",), {"address": "unix:/a"}, "cannot dial unix:/a"),
        (("new",), {"address": "0.0.0.0:7443"}, "cannot dial 0"),
    ],
)
def test_a_refused_request_writes_nothing(
    tmp_path: Path, names: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "fed"
    make(folder, "hospital-a", "moved")
    (folder / "moved").rename(tmp_path / "moved")
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    with pytest.raises(FedloomError, match=words):
        make(folder, *names, **options)
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_an_authority_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "a")
    other = CertificateAuthority.create(tmp_path / "b")
    with pytest.raises(ConfigError, match="holds a CA already"):
        CertificateAuthority.create(tmp_path / "a")
    (authority.folder / "ca.key").write_bytes((other.folder / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        CertificateAuthority(authority.folder)
    (authority.folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"no usable ca\.pem and ca\.key"):
        CertificateAuthority(authority.folder)


def test_nothing_secret_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = make(tmp_path / "fed", "hospital-a")
    secrets = [
        path.read_text().splitlines()[1]
        for path in (tmp_path / "fed").rglob("*key*")
        if path.is_file()
    ]
    assert len(secrets) == 3
    assert not any(secret in told + caplog.text for secret in secrets)
