"""Make keys for a test: a certificate for a SuperLink on this machine, and a key pair for each
SuperNode.

python keys.py FOLDER NAME...
"""

import ipaddress
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def certificate(folder: Path) -> None:
    """Write `superlink.crt`, self-signed, and `superlink.key`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name.from_rfc4514_string("CN=superlink")
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    uses = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    uses |= dict.fromkeys(("digital_signature", "key_cert_sign", "crl_sign"), True)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(**uses, encipher_only=False, decipher_only=False), critical=True
        )
        .add_extension(own, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "superlink.crt").write_bytes(made.public_bytes(Encoding.PEM))
    secret(folder / "superlink.key", key, PrivateFormat.PKCS8)


def pair(folder: Path, name: str) -> None:
    """Write a SuperNode's private key, and `NAME.pub` for registration at the SuperLink."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret(folder / name, key, PrivateFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )


def secret(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    """Write a private key that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    certificate(folder)
    for name in sys.argv[2:]:
        pair(folder, name)
