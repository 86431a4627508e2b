"""The wire: gRPC with mutual TLS, and our own messages in small pieces.

One call is one stream. Its first frame says what it is about and how long it is; pieces follow. The answer comes the
same way. Either end says how much it has already, so that what a broken connection had brought over is not sent again,
and a call has an id, so that its work is done once however often it is made. Signs of life go over a connection of
their own: behind a large transfer on a slow line they would seem to be missing.

`frames` holds what both sides agree on, `rpc_server` answers calls, and `rpc_client` makes them.
"""

from __future__ import annotations

from fedloom.remote.frames import LARGEST, MOST_WORDS, PIECE, PULSE, SILENCE, digest
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_server import Handler, RPCServer, local, serve

__all__ = [
    "LARGEST",
    "MOST_WORDS",
    "PIECE",
    "PULSE",
    "SILENCE",
    "Handler",
    "RPCClient",
    "RPCServer",
    "ServerAddress",
    "digest",
    "local",
    "serve",
]
