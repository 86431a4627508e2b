"""A party's credentials: its certificate and key, the federation's CA, and the list of revoked
certificates.

Names come from certificates only, and both ends of every connection present one. A certificate
needs a DNS name such as `hospital-a`; its owner's address may be any.
"""

import asyncio
import logging
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from fedloom.core.errors import ConfigError, EngineError

log = logging.getLogger("fedloom.net")

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_REPAIRS = {
    **dict.fromkeys(
        (18, 19, 20, 21),
        "its certificate is from another CA than ca in node.toml; use files of one federation",
    ),
    62: "correct the name or the address in callers of node.toml",
}
"""OpenSSL's codes for a certificate that no known CA has signed, and for a valid one with another
name.
"""
_NEW_LIST = "the CA's owner makes a new one by fedloom certs --list: copy its revoked.pem here"
_NEW_CERTIFICATE = (
    "run fedloom certs --request NAME beside its key, and have the CA's owner sign request.pem"
)
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.MAX_LENGTH)


@dataclass(frozen=True)
class Credentials:
    """Files for mutual TLS, read and checked on construction.

    Args:
        ca: PEM certificates of the CA.
        certificate: the local certificate in PEM, followed by any intermediate certificates.
        key: its private key in PEM, without a password.
        revoked: PEM list of revoked certificates (CRL), read again whenever it changes. Without a
            list, a stolen key works until its certificate expires.

    Raises:
        ConfigError: a file is missing or unreadable, the key does not match, or the certificate is
            expired, not yet valid, not signed by this CA, or too weak for OpenSSL.
    """

    ca: Path
    certificate: Path
    key: Path
    revoked: Path | None = None
    _ca: bytes = field(init=False, repr=False, compare=False)
    _certificate: bytes = field(init=False, repr=False, compare=False)
    _key: bytes = field(init=False, repr=False, compare=False)
    _list: "_RevocationList | None" = field(init=False, repr=False, compare=False)
    _client: ssl.SSLContext = field(init=False, repr=False, compare=False)
    _told: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            object.__setattr__(self, f"_{name}", _read(getattr(self, name)))
        authorities = _certificates(self.ca, self._ca)
        chain = _certificates(self.certificate, self._certificate)
        _check_chain(self.certificate, chain, self.ca, authorities)
        _check_key(self.key, self._key, self.certificate, chain[0])
        revoked = None if self.revoked is None else _RevocationList(self.revoked, authorities)
        object.__setattr__(self, "_list", revoked)
        client = ssl.create_default_context(cadata=self._ca.decode())
        try:
            client.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            why = error.reason or "unknown reason"
            raise ConfigError(
                f"OpenSSL rejects {self.certificate} ({why}); ask the CA for a new certificate"
            ) from None
        client.set_alpn_protocols(["h2"])
        object.__setattr__(self, "_client", client)

    @property
    def name(self) -> str:
        """The owner's name: the certificate's first DNS name, or else its common name."""
        return _shown(self._certificate).name

    @property
    def roles(self) -> tuple[str, ...]:
        """What the CA allows its owner: the organizational units of its subject."""
        return _shown(self._certificate).roles

    @property
    def ends(self) -> dict[str, datetime]:
        """When the certificate ends, and the list of revoked certificates, if there is one."""
        listed = {} if self._list is None else {"list of revoked certificates": self._list.ends}
        return {"certificate": _shown(self._certificate).ends, **listed}

    @staticmethod
    def roles_in(pem: bytes) -> tuple[str, ...]:
        """The roles in another's certificate, which `caller` or `signed` has checked."""
        return _shown(pem).roles

    def server(self) -> grpc.ServerCredentials:
        """For a server that requires a certificate of the CA; `caller` gives the caller's name."""
        return grpc.ssl_server_credentials(
            [(self._key, self._certificate)], self._ca, require_client_auth=True
        )

    def channel(self, only: bytes | None = None) -> grpc.ChannelCredentials:
        """For a channel to a server with any certificate of the CA, or with the one that
        `check_server` returned.

        The channel must also name the server: option `("grpc.ssl_target_name_override", name)`.
        """
        return grpc.ssl_channel_credentials(only or self._ca, self._key, self._certificate)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For TLS 1.3 without a socket of its own, in which both ends present certificates: see
        `sealed`.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._ca.decode())
        context.load_cert_chain(self.certificate, self.key)
        if server:
            context.num_tickets = 0
        return context

    def caller(self, context: Mapping[str, Iterable[bytes]]) -> str | None:
        """The name in a caller's certificate; None if it is missing, revoked, expired or not yet
        valid.

        Args:
            context: `auth_context()` of the call; gRPC has checked the signatures. Cheap enough for
                every call.
        """
        for pem in context.get("x509_pem_cert", ()):
            try:
                shown = _shown(pem)
            except (ValueError, x509.DuplicateExtension):  # OpenSSL accepts more than this parser
                return None
            why = "" if self._list is None else self._list.against(shown)
            if not shown.begins <= datetime.now(UTC) <= shown.ends:
                why = (
                    f"its certificate is valid from {shown.begins:%Y-%m-%d} to "
                    f"{shown.ends:%Y-%m-%d}"
                )
            if why != self._told.get(shown.name, ""):  # not at each call
                self._told[shown.name] = why
                log.warning(
                    "%a is %s", shown.name, f"not accepted: {why}" if why else "accepted again"
                )
            return None if why else shown.name or None
        return None

    @property
    def shown(self) -> bytes:
        """The certificate in PEM, with any intermediate ones, by which others check `sign`."""
        return self._certificate

    def sign(self, text: bytes) -> bytes:
        """The signature of a text by the certificate's key."""
        key = load_pem_private_key(self._key, password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(text, ec.ECDSA(SHA256()))
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(text, _PSS, SHA256())
        if isinstance(key, ed25519.Ed25519PrivateKey):
            return key.sign(text)
        raise ConfigError(
            f"{self.key}: secure sums need an EC, RSA or Ed25519 key, not {type(key).__name__}"
        )

    def signed(self, name: str, shown: bytes, text: bytes, signature: bytes) -> bool:
        """Whether a text was signed by the owner of a certificate of this CA for `name`, which is
        valid now.

        Args:
            name: of the expected signer.
            shown: their certificate in PEM, as `shown`.
            text: the signed text.
            signature: of it.
        """
        try:
            chain = x509.load_pem_x509_certificates(shown)
            _check_chain(self.certificate, chain, self.ca, _certificates(self.ca, self._ca))
            if not all(
                one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
                for one in chain[1:]
            ):
                return False  # the key of a node's certificate issues no others
            if self.caller({"x509_pem_cert": [shown]}) != name:
                return False
            check_signature(chain[0], text, signature)
        except (
            ValueError,
            InvalidSignature,
            ConfigError,
            x509.ExtensionNotFound,
            x509.DuplicateExtension,
        ):
            return False
        return True

    async def check_server(self, address: str, name: str, seconds: float = 5.0) -> bytes:
        """Connect once, and check a server's name and revocation, which gRPC's clients cannot
        check.

        Args:
            address: `host:port` or `unix:/path`.
            name: that its certificate must have.
            seconds: timeout.

        Returns:
            The server's certificate in PEM. `channel` with it accepts no other certificate.

        Raises:
            EngineError: no answer, or an untrusted server; the text gives the reason.
        """
        untrusted = f"the server at {address} is not trusted as {name}"
        # the server would only break the connection
        if datetime.now(UTC) > (ends := _shown(self._certificate).ends):
            raise EngineError(f"{self.certificate} expired on {ends:%Y-%m-%d}; {_NEW_CERTIFICATE}")
        try:
            async with asyncio.timeout(seconds):
                der = await _handshake(address, name, self._client)
        except ssl.SSLError as error:
            why = (getattr(error, "verify_message", "") or error.reason or "no TLS").rstrip(".")
            repair = _REPAIRS.get(getattr(error, "verify_code", 0), "")
            raise EngineError(f"{untrusted}: {why}{repair and f'; {repair}'}") from None
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"{name} does not answer at {address}: {str(error) or 'timeout'}"
            ) from None
        except ValueError as error:  # such as a label that is too long for DNS
            raise EngineError(f"{address!r} is not a valid address of {name}: {error}") from None
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        try:
            why = "" if self._list is None else self._list.against(_shown(pem))
        except (ValueError, x509.DuplicateExtension):
            why = "unreadable certificate"
        if why:
            raise EngineError(f"{untrusted}: {why}")
        return pem


def check_signature(certificate: x509.Certificate, text: bytes, signature: bytes) -> None:
    """Check that a certificate's key has signed a text; whose certificate it is must be checked
    apart.

    Raises:
        InvalidSignature: it has not, or the key is of a kind that signs nothing here.
    """
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, text, ec.ECDSA(SHA256()))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, text, _PSS, SHA256())
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, text)
    else:
        raise InvalidSignature


def endpoint(address: str) -> tuple[str, int] | str:
    """`host:port` (or `[::1]:port`) as a pair, `unix:/path` as the path.

    Raises:
        ConfigError: the address has another form.
    """
    if address.startswith("unix:"):
        return address.removeprefix("unix:")
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"an address must be host:port, such as 127.0.0.1:7443, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def local(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return address.startswith(("unix:", *(f"{host}:" for host in _LOOPBACK), "[::1]:"))


async def _handshake(address: str, name: str, context: ssl.SSLContext) -> bytes:
    """The certificate of a server, in DER, once the context has accepted it."""
    place = endpoint(address)
    if isinstance(place, str):
        _, writer = await asyncio.open_unix_connection(place, ssl=context, server_hostname=name)
    else:
        _, writer = await asyncio.open_connection(*place, ssl=context, server_hostname=name)
    der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return der


@dataclass(frozen=True)
class _PresentedCertificate:
    """The fields of a certificate."""

    name: str
    serial: int
    issuer: x509.Name
    begins: datetime
    ends: datetime
    roles: tuple[str, ...]


@lru_cache(maxsize=4096)
def _shown(pem: bytes) -> _PresentedCertificate:
    """The fields of the first certificate in a PEM text."""
    found = x509.load_pem_x509_certificate(pem)
    names: list[str] = []
    with suppress(x509.ExtensionNotFound):
        alternative = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = alternative.get_values_for_type(x509.DNSName)
    common = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = names[0] if names else str(common[0].value) if common else ""
    units = found.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATIONAL_UNIT_NAME)
    roles = tuple(str(one.value) for one in units)
    return _PresentedCertificate(
        name,
        found.serial_number,
        found.issuer,
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        roles,
    )


class _RevocationList:
    """The CA's list on disk. Once a valid list was read, an invalid one is logged and ignored.

    Attributes:
        ends: when it expires.
    """

    def __init__(self, path: Path, authorities: list[x509.Certificate]) -> None:
        self._path, self._authorities = path, authorities
        self._stamp = self._now()
        self._take()

    def against(self, shown: _PresentedCertificate) -> str:
        """Why a certificate is not trusted: revoked, or not covered by the list. "" for a trusted
        one.
        """
        stamp = self._now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._take()
            except ConfigError as error:
                log.warning("%s; the previous list stays in force", error)
        if shown.issuer != self._issuer:
            return "certificate and list of revoked certificates have different CAs"
        if datetime.now(UTC) > self.ends:
            return f"the list of revoked certificates expired on {self.ends:%Y-%m-%d}; {_NEW_LIST}"
        return "certificate revoked" if shown.serial in self._serials else ""

    def _now(self) -> tuple[int, ...]:
        """A stamp that changes when the file does."""
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _take(self) -> None:
        """Read the file."""
        try:
            found = x509.load_pem_x509_crl(_read(self._path))
        except ValueError:
            raise ConfigError(
                f"{self._path} is not a PEM list of revoked certificates; copy it from the CA again"
            ) from None
        if not any(a.subject == found.issuer and _signed(found, a) for a in self._authorities):
            raise ConfigError(
                f"{self._path} is not signed by the CA; copy the list from the CA again"
            )
        ends = found.next_update_utc or datetime.max.replace(tzinfo=UTC)
        if ends < datetime.now(UTC):
            raise ConfigError(f"{self._path} expired on {ends:%Y-%m-%d}; {_NEW_LIST}")
        self._serials = frozenset(one.serial_number for one in found)
        self._issuer, self.ends = found.issuer, ends


def _signed(found: x509.CertificateRevocationList, by: x509.Certificate) -> bool:
    key = by.public_key()
    try:
        return found.is_signature_valid(key)  # type: ignore[arg-type]  # a key that cannot sign is a TypeError
    except TypeError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it with fedloom certs --request"
        ) from None


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(
            f"{path} is not a PEM certificate; make one with fedloom certs --request"
        ) from None


def _check_chain(
    path: Path, chain: list[x509.Certificate], ca: Path, authorities: list[x509.Certificate]
) -> None:
    """Check that each is signed by the next, the last by the CA, and that all are
    currently valid.
    """
    now = datetime.now(UTC)
    for one in chain:
        if now < one.not_valid_before_utc:
            raise ConfigError(
                f"{path} is not valid before {one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
                "check the clock"
            )
        if now > one.not_valid_after_utc:
            raise ConfigError(
                f"{path} expired on {one.not_valid_after_utc:%Y-%m-%d}; {_NEW_CERTIFICATE}"
            )
    issuers = [[above] for above in chain[1:]] + [authorities]
    for one, above in zip(chain, issuers, strict=True):
        if not any(_issued(one, by) for by in above):
            raise ConfigError(
                f"{path} is not signed by the CA in {ca}; use files of one federation"
            )


def _issued(one: x509.Certificate, by: x509.Certificate) -> bool:
    if one == by:
        return True
    try:
        one.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_key(path: Path, pem: bytes, of: Path, certificate: x509.Certificate) -> None:
    """Check that the key is the certificate's, and warn if other users can read it."""
    try:
        public = load_pem_private_key(pem, password=None).public_key()
    except TypeError:
        raise ConfigError(f"{path} has a password; store the key without one") from None
    except ValueError:
        raise ConfigError(
            f"{path} is not a PEM key; make one with fedloom certs --request"
        ) from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"{path} is not the key of {of}; copy both from the same folder")
    if path.stat().st_mode & 0o077:
        log.warning("%s can be read by others on this machine: chmod 600 %s", path, path)
