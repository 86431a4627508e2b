"""TLS 1.3 between two nodes whose bytes are carried by the coordinator, which has no key of it.

The node that fetches is the client, the node that answers the server; both present their
certificates. The handshake takes two calls, the second of which brings the request.
"""

import ssl
from contextlib import suppress

from fedloom.remote.credentials import Credentials
from fedloom.remote.rpc_errors import CallRefused, refused


class SealedChannel:
    """One end of such a connection. Without certificates it passes bytes as they are, and believes
    the claimed name.

    Args:
        credentials: the local certificate; None for the insecure mode.
        peer: the name of the other end.
        server: whether this end answers.
    """

    def __init__(self, credentials: Credentials | None, peer: str, *, server: bool) -> None:
        self._credentials, self._peer = credentials, peer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        if credentials is not None:
            context = credentials.context(server=server)
            name = None if server else peer
            self._tls = context.wrap_bio(
                self._in, self._out, server_side=server, server_hostname=name
            )

    def shake(self, received: bytes | memoryview = b"") -> bytes:
        """One step of the handshake: the bytes to send.

        Raises:
            CallRefused: the other end is not trusted.
        """
        self._in.write(received)
        if self._tls is None:
            return b""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._out.read()
        except ssl.SSLError as error:
            raise self._untrusted(
                getattr(error, "verify_message", "") or error.reason or "no TLS"
            ) from None
        self._check()
        return self._out.read()

    def seal(self, data: bytes) -> bytes:
        """The bytes that carry `data`."""
        if self._tls is None:
            return data
        self._tls.write(data)
        return self._out.read()

    def open(self, received: bytes | memoryview = b"") -> bytes:
        """The data in received bytes, and in those that came with the end of the handshake.

        Raises:
            CallRefused: the bytes were altered or cut.
        """
        self._in.write(received)
        if self._tls is None:
            return self._in.read()
        data = bytearray()
        try:
            with suppress(ssl.SSLWantReadError):
                while piece := self._tls.read(1 << 20):
                    data += piece
        except ssl.SSLError as error:
            raise self._untrusted(error.reason or "no TLS") from None
        return bytes(data)

    def _check(self) -> None:
        """Check the name and the revocation of the other end."""
        assert self._tls is not None and self._credentials is not None
        pem = ssl.DER_cert_to_PEM_cert(self._tls.getpeercert(binary_form=True) or b"").encode()
        if self._credentials.caller({"x509_pem_cert": [pem]}) != self._peer:
            raise self._untrusted("another name, or revoked")

    def _untrusted(self, why: str) -> CallRefused:
        return refused(f"the other end is not trusted as {self._peer}: {why}")
