"""Templates of the configs that `fedloom certs` writes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

import tomli_w

from fedloom.core.errors import ConfigError

COORDINATOR = "coordinator"
FEDERATION, NODE, RELAY = "federation.toml", "node.toml", "relay.toml"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_NODE_TOML = Template("""\
# A node of the federation. Run it with: fedloom node node.toml
# It is the node's policy. Paths are relative to this file.
name = "$name"  # as in its certificate
$place
# The state of its runs. Keep this folder, readable by its owner only.
state = "state"

# The federation's CA, the node's certificate, its key (which never leaves this machine), and the list of revoked
# certificates, which is read again whenever it changes.
ca = "ca.pem"
certificate = "certificate.pem"
key = "key.pem"
revoked = "revoked.pem"

# Coordinators that may start runs here.
$callers
# Peers that exchange messages with this node.
$peers
# Limit of a run's rounds.
most_rounds = 1000
# Smallest batch size: the fewer rows in a step, the more it reveals about each.
least_batch = 1
# Allowed methods; delete those that you do not want. Tables [methods.NAME] instead set conditions on settings.
$methods

# The data of runs with data.name = "digits".
[data.digits]
# A public data set, of which a run assigns this node its part.
set = "digits"
# Or, instead, a file with rows of your own, which never leave this node.
# rows = "mine.csv"
""")
_LISTEN = Template("""\
# The address that it listens at.
listen = "$listen"
""")
_OR_RELAY = Template("""\
# Or, instead, a relay, if this machine has no open port.
# relay = "$relay"
# relay_name = "$relay_name"
""")
_RELAYED = Template("""\
# The relay through which callers reach this node, and the name in the relay's certificate.
relay = "$relay"
relay_name = "$relay_name"
# Or, instead of both, the address that it listens at.
# listen = "0.0.0.0:7443"
""")
_FEDERATION_TOML = Template("""\
# The coordinator's federation: give this file to fedloom run as --federation. Paths are relative to it.
ca = "$me/ca.pem"
certificate = "$me/certificate.pem"
key = "$me/key.pem"
revoked = "$me/revoked.pem"

# Party k of a run is at the k-th node, counted from 0. Names are those in their certificates.
""")
_RELAY_TOML = Template("""\
# A relay for nodes without an open port. Run it with: fedloom relay relay.toml
# It learns names, times and sizes; content is encrypted end to end. Paths are relative to this file.
listen = "$listen"

ca = "ca.pem"
certificate = "certificate.pem"
key = "key.pem"
revoked = "revoked.pem"

# Nodes that may be reached through it.
$nodes
# Parties that may reach them: the coordinator, and peers.
$callers
# Limit of open connections of one caller, and to one node.
most_open = 64
""")


class RelayAddress(NamedTuple):
    """The address of a relay."""

    name: str
    address: str


class NodeLocation(NamedTuple):
    """The address of a node, or its relay."""

    address: str = ""
    relay: RelayAddress | None = None


def read(folder: Path) -> dict[str, NodeLocation]:
    """The nodes in a folder's `federation.toml`; none if the file does not exist.

    Raises:
        ConfigError: the file is invalid.
    """
    path = folder / FEDERATION
    if not path.exists():
        return {}
    try:
        nodes = tomllib.loads(path.read_text(encoding="utf-8")).get("nodes", [])
        return {node["name"]: _place(node) for node in nodes}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is invalid ({error}); fix it first") from None


def _place(node: Mapping[str, str]) -> NodeLocation:
    if "relay" in node:
        return NodeLocation(relay=RelayAddress(node.get("relay_name", "relay"), node["relay"]))
    return NodeLocation(node["address"])


def federation_toml(before: str, new: Mapping[str, NodeLocation]) -> str:
    """The text of a federation's file with further nodes appended."""
    text = before.rstrip("\n") + "\n" if before else _FEDERATION_TOML.substitute(me=COORDINATOR)
    for name, place in new.items():
        where = {"address": place.address}
        if place.relay is not None:
            where = {"relay": place.relay.address, "relay_name": place.relay.name}
        text += f"\n[[nodes]]\n{tomli_w.dumps({'name': name, **where})}"
    return text


def node_toml(name: str, places: Mapping[str, NodeLocation], methods: Iterable[str], relay: RelayAddress | None) -> str:
    """A node's config with all other nodes as peers; `relay` is one that it could use."""
    place = places[name]
    if place.relay is not None:
        where = _RELAYED.substitute(relay=place.relay.address, relay_name=place.relay.name)
    else:
        where = _LISTEN.substitute(listen=listening(place.address))
        if relay is not None:
            where += _OR_RELAY.substitute(relay=relay.address, relay_name=relay.name)
    peers = [other for other in places if other != name]
    lists = {"callers": [COORDINATOR], "peers": peers, "methods": sorted(methods)}
    return _NODE_TOML.substitute(_lines(lists), name=name, place=where)


def relay_toml(relay: RelayAddress, places: Mapping[str, NodeLocation]) -> str:
    """A relay's config for all nodes."""
    lists = {"nodes": [*places], "callers": [COORDINATOR, *places]}
    return _RELAY_TOML.substitute(_lines(lists), listen=listening(relay.address))


def listening(address: str) -> str:
    """The address to listen at for `address`: the same on loopback, otherwise all interfaces."""
    host, _, port = address.rpartition(":")
    if host in _LOOPBACK:
        return address
    return f"[::]:{port}" if ":" in host else f"0.0.0.0:{port}"


def _lines(lists: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The lists as TOML, by name."""
    return {key: tomli_w.dumps({key: values}).rstrip() for key, values in lists.items()}
