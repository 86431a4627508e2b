"""Keys that are made where they are used: requests, their signature, the CA's password, and lists
that expire.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console

from fedloom.cli import federation as commands
from fedloom.core.errors import ConfigError
from fedloom.remote import certs, credentials
from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.config import read
from tests.command import Done, fedloom

__all__ = ["fedloom"]
PASSWORD = "correct horse battery"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is typed at each question: a password, or whether to sign."""
    typed: list[Any] = []

    def prompt(*_: object, confirmation_prompt: bool = False, **__: object) -> str:
        assert isinstance(typed[0], str), "a password is asked for, but none is expected"
        return str(typed.pop(0))

    def confirm(*_: object, **__: object) -> bool:
        assert isinstance(typed[0], bool), "a confirmation is asked for, but none is expected"
        return bool(typed.pop(0))

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("typer.confirm", confirm)
    return typed


def test_a_site_gets_a_certificate_and_its_key_stays(
    fedloom: Callable[..., Done], prompts: list[Any], tmp_path: Path
) -> None:
    """The commands of docs/net.md, in the folders of the CA's owner and of the site."""
    prompts += [PASSWORD]
    told = fedloom("certs", "hospital-a", "hospital-b", "--out", "fed").stdout
    assert "fedloom certs --request hospital-a" in told and "holds no secret" in told
    assert [path.parent.name for path in Path("fed").glob("*/key.pem")] == ["coordinator"]
    site = tmp_path / "site"
    Path("fed/hospital-a").rename(site)  # it is sent there
    with pytest.raises(ConfigError, match=r"certificate\.pem cannot be read.*--request"):
        _ = read(site / "node.toml").credentials

    asked = fedloom("certs", "--request", "hospital-a", "--out", str(site)).stdout
    fingerprint = asked.partition("fingerprint of the key: ")[2].partition("\n")[0]
    assert (site / "key.pem").stat().st_mode & 0o777 == 0o600 and len(fingerprint.split()) == 8
    assert b"PRIVATE" not in (site / "request.pem").read_bytes()

    prompts += [PASSWORD, False]
    shown = fedloom("certs", "--sign", str(site / "request.pem"), "--out", "fed").stdout
    assert "not signed" in shown and not Path("fed/hospital-a").exists()
    prompts += [PASSWORD, True]
    shown = fedloom("certs", "--sign", str(site / "request.pem"), "--out", "fed").stdout
    assert f"fingerprint  {fingerprint}" in shown and "name         hospital-a" in shown
    assert not prompts and not [*Path("fed/hospital-a").glob("*key*")]

    (site / "certificate.pem").write_bytes(Path("fed/hospital-a/certificate.pem").read_bytes())
    mine = read(site / "node.toml").credentials
    assert mine is not None and mine.name == "hospital-a" and mine.roles == ()
    assert [one.name for one in CertificateAuthority(Path("fed"), lambda: PASSWORD).issued()] == [
        "coordinator",
        "hospital-a",
    ]
    prompts += [PASSWORD]
    refused = fedloom("certs", "hospital-a", "--renew", "--out", "fed", code=2).stderr
    assert "the key of hospital-a is not here: run fedloom certs --request hospital-a" in refused
    again = fedloom("certs", "--request", "hospital-a", "--out", str(site)).stdout
    assert fingerprint in again and "kept" in again  # to renew: the key stays


def test_the_keys_of_a_test_are_made_here_without_a_question(
    fedloom: Callable[..., Done], prompts: list[Any]
) -> None:
    fedloom("certs", "hospital-a", "--all-here", "--out", "fed")
    assert read(Path("fed/hospital-a/node.toml")).credentials is not None
    assert b"ENCRYPTED" not in Path("fed/ca.key").read_bytes()
    prompts += [True]
    fedloom("certs", "--request", "hospital-b", "--out", "b")
    told = fedloom("certs", "--sign", "b/request.pem", "--out", "fed").stdout
    assert "has no node hospital-b: add it with fedloom certs hospital-b" in told


def test_the_cas_key_is_sealed_by_its_password(
    fedloom: Callable[..., Done], prompts: list[Any]
) -> None:
    prompts += ["too short"]
    assert "at least 12 characters" in fedloom("certs", "a", "--out", "fed", code=2).stderr
    assert not Path("fed/ca.key").exists()
    prompts += [PASSWORD]
    fedloom("certs", "a", "--out", "fed")
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in Path("fed/ca.key").read_bytes()
    before = {path: path.read_bytes() for path in Path("fed").rglob("*") if path.is_file()}
    for words in (["b"], ["--revoke", "coordinator"], ["--list"], ["coordinator", "--renew"]):
        prompts += ["wrong password"]
        assert "the password is wrong" in fedloom("certs", *words, "--out", "fed", code=2).stderr
    assert {path: path.read_bytes() for path in Path("fed").rglob("*") if path.is_file()} == before
    prompts += [PASSWORD] * 3
    fedloom("certs", "b", "--out", "fed")
    fedloom("certs", "coordinator", "--renew", "--out", "fed")
    fedloom("certs", "coordinator", "--revoke", "--out", "fed")
    assert not prompts


def request(path: Path, name: str = "site", units: tuple[str, ...] = (), key: Any = None) -> Path:
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = [x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]
    subject += [x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units]
    made = (
        x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject)).sign(key, SHA256())
    )
    path.write_bytes(made.public_bytes(Encoding.PEM))
    return path


def torn(path: Path) -> Path:
    """A request whose signature is another's."""
    one, two = (
        x509.load_pem_x509_csr(request(path, name).read_bytes()) for name in ("site", "evil")
    )
    der = one.public_bytes(Encoding.DER).replace(b"site", b"evil")
    assert x509.load_der_x509_csr(der).subject == two.subject
    path.write_bytes(x509.load_der_x509_csr(der).public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "cannot be read"),
        (lambda path: [path.write_text("no request"), path][1], "is no PEM request"),
        (torn, "is not signed by the key in it"),
        (lambda path: request(path, units=("admin",)), "asks for the role 'admin'"),
        (lambda path: request(path, "../up"), "lower-case"),
        (lambda path: request(path, "a\x1b[2J"), "lower-case"),
        (
            lambda path: request(path, key=rsa.generate_private_key(65537, 2048)),
            "at least 3072 bits",
        ),
    ],
)
def test_what_is_no_sound_request_is_not_signed(
    make: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    CertificateAuthority.create(tmp_path / "fed")
    path = make(tmp_path / "request.pem")
    with pytest.raises(ConfigError, match=words):
        commands.sign(
            path,
            tmp_path / "fed",
            Console(file=io.StringIO()),
            password=lambda new: "",
            sure=lambda: True,
        )
    assert CertificateAuthority(tmp_path / "fed").issued() == []


def test_certificates_and_lists_are_short_lived(tmp_path: Path) -> None:
    commands.certs(["a"], tmp_path / "fed", ["fedal"], Console(file=io.StringIO()), here=True)
    shown = x509.load_pem_x509_certificate((tmp_path / "fed/a/certificate.pem").read_bytes())
    listed = x509.load_pem_x509_crl((tmp_path / "fed/a/revoked.pem").read_bytes())
    ends = listed.next_update_utc
    assert ends is not None and timedelta(days=6, hours=23) < ends - datetime.now(UTC) < timedelta(
        days=7, hours=1
    )
    assert (
        timedelta(days=29, hours=23)
        < shown.not_valid_after_utc - datetime.now(UTC)
        < timedelta(days=30, hours=1)
    )


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Turns the clock of those who check certificates."""

    def turn(days: int) -> None:
        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime.now(tz) + timedelta(days=days)

        monkeypatch.setattr(credentials, "datetime", Later)

    return turn


def test_what_has_expired_is_named_with_its_repair(
    tmp_path: Path, later: Callable[[int], None]
) -> None:
    folder = tmp_path / "fed"
    out = io.StringIO()
    commands.certs(["a"], folder, ["fedal"], Console(file=out, width=200), here=True)
    assert "renew it with fedloom certs --list" in out.getvalue()
    mine = read(folder / "a/node.toml").credentials
    other = {"x509_pem_cert": [(folder / "coordinator/certificate.pem").read_bytes()]}
    assert mine is not None and mine.caller(other) == "coordinator"
    later(8)
    assert mine.caller(other) is None
    with pytest.raises(
        ConfigError, match=r"revoked\.pem expired on .* fedloom certs --list: copy its revoked\.pem"
    ):
        _ = read(folder / "a/node.toml").credentials
    later(31)
    with pytest.raises(
        ConfigError, match=r"certificate\.pem expired on .* run fedloom certs --request NAME"
    ):
        Credentials(folder / "a/ca.pem", folder / "a/certificate.pem", folder / "a/key.pem")


def test_a_new_list_reaches_a_running_node(tmp_path: Path, later: Callable[[int], None]) -> None:
    folder = tmp_path / "fed"
    commands.certs(["a"], folder, ["fedal"], Console(file=io.StringIO()), days=90, here=True)
    mine = read(folder / "a/node.toml").credentials
    other = {"x509_pem_cert": [(folder / "coordinator/certificate.pem").read_bytes()]}
    later(8)
    assert mine is not None and mine.caller(other) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "LIST_DAYS", 20)
        commands.renew_list(folder, Console(file=io.StringIO()), lambda new: "")
    assert mine.caller(other) == "coordinator"


def test_a_question_without_a_terminal_is_an_error_in_one_sentence(
    fedloom: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    fedloom("certs", "hospital-a", "--all-here", "--out", "fed")
    fedloom("certs", "--request", "hospital-b", "--out", "b")
    done = fedloom("certs", "--sign", "b/request.pem", "--out", "fed", code=2)
    assert "the question was not answered: run the command at a terminal" in done.stderr
    assert "Traceback" not in done.stderr
