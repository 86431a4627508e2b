"""A certificate authority (CA) in a folder, for tests and small federations; any other CA can replace it.

The folder holds `ca.pem`, `ca.key`, `issued.csv` (issued certificates with revocation dates) and `revoked.pem`.
Whoever has `ca.key` can impersonate any party, so keep it on no node.
"""

import csv
import io
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.core.errors import ConfigError

CA, CA_KEY, ISSUED, REVOKED = "ca.pem", "ca.key", "issued.csv", "revoked.pem"
CA_DAYS = 3650
_AGO = timedelta(hours=1)
"""How long before its creation a certificate becomes valid, for machines with slow clocks."""


class IssuedCertificate(NamedTuple):
    """A line of `issued.csv`; dates are in UTC, and `revoked` is empty for a valid certificate."""

    name: str
    serial: int
    ends: str
    revoked: str = ""


class CertificateAuthority:
    """Issues and revokes certificates.

    Raises:
        ConfigError: the folder has no complete CA.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            key = load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder} holds no usable {CA} and {CA_KEY}: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self.certificate.public_key():
            raise ConfigError(f"{folder / CA_KEY} is not the key of {folder / CA}")
        self._key = key

    @staticmethod
    def create(folder: Path) -> "CertificateAuthority":
        """A new CA, with an empty list of revoked certificates.

        Raises:
            ConfigError: the folder has a CA already.
        """
        if (folder / CA).exists() or (folder / CA_KEY).exists():
            raise ConfigError(f"{folder} holds a CA already; choose another folder")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedloom {x509.random_serial_number():x}"[:40])])
        usage = _usage(key_cert_sign=True, crl_sign=True)
        made = (
            _certificate(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(folder / CA_KEY, _pem(key), secret=True)
        write(folder / CA, made.public_bytes(Encoding.PEM))
        authority = CertificateAuthority(folder)
        authority._list([])
        authority._record([])
        return authority

    def issue(self, name: str, days: int) -> tuple[bytes, bytes]:
        """A new certificate for `name` and its key, in PEM: (certificate, key). It never outlasts the CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = (
            _certificate(subject, self.certificate.subject, key.public_key(), ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(self._above(), critical=False)
            .sign(self._key, SHA256())
        )
        self._record([*self.issued(), IssuedCertificate(name, made.serial_number, f"{ends:%Y-%m-%d}")])
        return made.public_bytes(Encoding.PEM), _pem(key)

    def revoke(self, name: str) -> int:
        """Revoke every certificate of `name`, and write the list. Returns the number of newly revoked ones.

        Raises:
            ConfigError: the CA has issued no certificate for that name.
        """
        issued = self.issued()
        serials = {one.serial for one in issued if one.name == name}
        if not serials:
            raise ConfigError(f"{self.folder / ISSUED} lists no certificate of {name!r}; check the name")
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
            IssuedCertificate(row["name"], int(row["serial"]), row["ends"], row.get("revoked") or "") for row in rows
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
            raise ConfigError(f"{self.folder / REVOKED} cannot be read ({error}); copy it from a node") from None

    def _list(self, revoked: list[x509.RevokedCertificate]) -> None:
        """Sign and write the list, which expires with the CA, so that nodes need no newer one."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(datetime.now(UTC) - _AGO)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(self._above(), critical=False)
            .add_extension(x509.CRLNumber(len(revoked)), critical=False)
        )
        for one in revoked:
            builder = builder.add_revoked_certificate(one)
        write(self.folder / REVOKED, builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def _above(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


def write(path: Path, data: bytes, secret: bool = False) -> None:
    """Write or replace a file atomically; a secret is readable by its owner only."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, ends: datetime
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
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign"
    none = dict.fromkeys([*names.split(), "crl_sign", "encipher_only", "decipher_only"], False)
    return x509.KeyUsage(**none | what)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
