"""A certificate authority (CA) in a folder, for small federations; any other CA can replace it.

The folder holds `ca.pem`, `ca.key`, `issued.csv` (issued certificates with revocation dates) and
`revoked.pem`. Whoever has `ca.key` can impersonate any party, so it has a password, and belongs on
no node. A site makes its own key
and a request, which the CA signs: no key leaves the machine that made it.
"""

import csv
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.core.errors import ConfigError

CA, CA_KEY, ISSUED, REVOKED = "ca.pem", "ca.key", "issued.csv", "revoked.pem"
CA_DAYS, DAYS, LIST_DAYS = 3650, 30, 7
"""Validity of the CA, by default of a certificate, and of the list of revoked certificates, in
days.
"""
ROLES = ("submit", "approve", "stop", "audit")
"""What a certificate may allow its owner at nodes that allow it, too: to start runs, and at a site
to approve one, to stop one, and to confirm the audit log.
"""
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
_AGO = timedelta(hours=1)
"""How long before its creation a certificate becomes valid, for machines with slow clocks."""


class IssuedCertificate(NamedTuple):
    """A line of `issued.csv`; dates are in UTC, and `revoked` is empty for a valid certificate."""

    name: str
    serial: int
    ends: str
    revoked: str = ""


class Request(NamedTuple):
    """A site's request for a certificate.

    Attributes:
        name: of the site or person.
        roles: of `ROLES`.
        key: its public key.
    """

    name: str
    roles: tuple[str, ...]
    key: PublicKey

    @property
    def fingerprint(self) -> str:
        """A hash of the key, by which two people can compare it aloud."""
        return fingerprint(self.key)


class CertificateAuthority:
    """Issues and revokes certificates.

    Args:
        folder: of the CA.
        password: gives the password of its key; called only for a key that has one.

    Raises:
        ConfigError: the folder has no complete CA, or the password is wrong.
    """

    def __init__(self, folder: Path, password: Callable[[], str] | None = None) -> None:
        self.folder = folder
        try:
            self.certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            pem = (folder / CA_KEY).read_bytes()
            secret = password().encode() if b"ENCRYPTED" in pem and password is not None else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no usable {CA} and {CA_KEY}: {error}") from None
        try:
            key = load_pem_private_key(pem, secret)
        except (ValueError, TypeError) as error:
            why = "the password is wrong" if secret else str(error)
            raise ConfigError(f"{folder / CA_KEY} cannot be used: {why}") from None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != self.certificate.public_key()
        ):
            raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}")
        self._key = key

    @staticmethod
    def create(folder: Path, password: str = "") -> "CertificateAuthority":
        """A new CA, with an empty list of revoked certificates.

        Args:
            folder: of the CA.
            password: of its key; "" for none, for tests.

        Raises:
            ConfigError: the folder has a CA already.
        """
        if (folder / CA).exists() or (folder / CA_KEY).exists():
            raise ConfigError(f"{folder} holds a CA already; choose another folder")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [
                x509.NameAttribute(
                    NameOID.COMMON_NAME, f"fedloom {x509.random_serial_number():x}"[:40]
                )
            ]
        )
        usage = _usage(key_cert_sign=True, crl_sign=True)
        made = (
            _certificate(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(folder / CA_KEY, _pem(key, password), secret=True)
        write(folder / CA, made.public_bytes(Encoding.PEM))
        authority = CertificateAuthority(folder, lambda: password)
        authority._list([])
        authority._record([])
        return authority

    def issue(self, name: str, days: int, roles: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """A new certificate for `name` and its key, in PEM: (certificate, key). It never outlasts
        the CA.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        return self.sign(Request(name, (*roles,), key.public_key()), days), _pem(key)

    def sign(self, request: Request, days: int) -> bytes:
        """A certificate for a request, in PEM. It never outlasts the CA."""
        name, roles, key = request
        ends = min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
            _certificate(_subject(name, roles), self.certificate.subject, key, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(self._above(), critical=False)
            .sign(self._key, SHA256())
        )
        self._record(
            [*self.issued(), IssuedCertificate(name, made.serial_number, f"{ends:%Y-%m-%d}")]
        )
        return made.public_bytes(Encoding.PEM)

    def refresh(self) -> None:
        """Sign the list of revoked certificates again, for another `LIST_DAYS`."""
        self._list([*self._listed()])

    def revoke(self, name: str) -> int:
        """Revoke every certificate of `name`, and write the list. Returns the number of newly
        revoked ones.

        Raises:
            ConfigError: the CA has issued no certificate for that name.
        """
        issued = self.issued()
        serials = {one.serial for one in issued if one.name == name}
        if not serials:
            raise ConfigError(
                f"{self.folder / ISSUED} lists no certificate of {name!r}; check the name"
            )
        before = list(self._listed())
        now = datetime.now(UTC)
        new = [
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            for serial in sorted(serials - {one.serial_number for one in before})
        ]
        self._list([*before, *new])
        self._record(issued)
        return len(new)

    def issued(self) -> list[IssuedCertificate]:
        """All issued certificates. Files of earlier versions have no column `revoked`."""
        with (self.folder / ISSUED).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [
            IssuedCertificate(
                row["name"], int(row["serial"]), row["ends"], row.get("revoked") or ""
            )
            for row in rows
        ]

    def _record(self, issued: list[IssuedCertificate]) -> None:
        """Write `issued.csv`, with revocation dates from the list."""
        since = {one.serial_number: f"{one.revocation_date_utc:%Y-%m-%d}" for one in self._listed()}
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(IssuedCertificate._fields)
        lines.writerows(one._replace(revoked=since.get(one.serial, "")) for one in issued)
        write(self.folder / ISSUED, text.getvalue().encode())

    def _listed(self) -> x509.CertificateRevocationList:
        try:
            return x509.load_pem_x509_crl((self.folder / REVOKED).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / REVOKED} cannot be read ({error}); copy it from a node"
            ) from None

    def _list(self, revoked: list[x509.RevokedCertificate]) -> None:
        """Sign and write the list. It soon expires, so that nobody can withhold a newer one for
        long.
        """
        ends = min(
            datetime.now(UTC) + timedelta(days=LIST_DAYS), self.certificate.not_valid_after_utc
        )
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(datetime.now(UTC) - _AGO)
            .next_update(ends)
            .add_extension(self._above(), critical=False)
            .add_extension(x509.CRLNumber(len(revoked)), critical=False)
        )
        for one in revoked:
            builder = builder.add_revoked_certificate(one)
        write(self.folder / REVOKED, builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def _above(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


def make_request(name: str, roles: Sequence[str], folder: Path) -> Request:
    """Make a key and write a request for its certificate, `key.pem` and `request.pem`; a key that
    is there is kept.

    Raises:
        ConfigError: the key that is there cannot be used.
    """
    path = folder / "key.pem"
    if path.exists():
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be used ({error}): move it away for a new key"
            ) from None
        if not isinstance(
            key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
        ):
            raise ConfigError(
                f"{path} must be an EC, RSA or Ed25519 key: move it away for a new key"
            )
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(path, _pem(key), secret=True)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else SHA256()
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name, roles))
    write(folder / "request.pem", builder.sign(key, algorithm).public_bytes(Encoding.PEM))
    return Request(name, (*roles,), key.public_key())


def read_request(path: Path) -> Request:
    """The request in a file, whose sender has the key; nothing else about it is proved.

    Raises:
        ConfigError: it is no request, is not signed by its key, or asks for something that does not
            exist.
    """
    try:
        found = x509.load_pem_x509_csr(path.read_bytes())
        key, signed = found.public_key(), found.is_signature_valid
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise ConfigError(
            f"{path} is no PEM request for a certificate; make one with fedloom certs --request"
        ) from None
    if not signed:
        raise ConfigError(
            f"{path} is not signed by the key in it; make it again with fedloom certs --request"
        )
    short = isinstance(key, rsa.RSAPublicKey) and key.key_size < 3072
    if short or not isinstance(key, PublicKey):
        raise ConfigError(f"{path}: the key must be EC, Ed25519, or RSA of at least 3072 bits")
    names, units = (
        tuple(str(one.value) for one in found.subject.get_attributes_for_oid(oid))
        for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
    )
    if len(names) != 1:
        raise ConfigError(f"{path} must have one common name, not {len(names)}")
    if unknown := [unit for unit in units if unit not in ROLES]:
        raise ConfigError(f"{path} asks for the role {unknown[0]!a}; roles are {', '.join(ROLES)}")
    return Request(names[0], units, key)


def fingerprint(key: PublicKey) -> str:
    """The first half of the SHA-256 of a public key, in groups of four hexadecimal digits."""
    text = hashlib.sha256(
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()[:32]
    return " ".join(text[at : at + 4] for at in range(0, 32, 4))


def _subject(name: str, roles: Sequence[str]) -> x509.Name:
    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), *units])


def write(path: Path, data: bytes, secret: bool = False) -> None:
    """Write or replace a file atomically; a secret is readable by its owner only."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(
        os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb"
    ) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _AGO)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(**what: bool) -> x509.KeyUsage:
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign"
    )
    none = dict.fromkeys([*names.split(), "crl_sign", "encipher_only", "decipher_only"], False)
    return x509.KeyUsage(**none | what)


def _pem(key: ec.EllipticCurvePrivateKey, password: str = "") -> bytes:
    how = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
