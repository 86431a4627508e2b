"""The configs that `fedloom certs` writes beside its certificates, with comments that teach."""

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
# It decides here what others may do. Paths are relative to this file.
name = "$name"  # as in its certificate
$place
# What the node remembers of its runs. Keep it, and let nobody else read it.
state = "state"

# Who signs for this federation, the node's own certificate, its key (which leaves this machine never), and the
# certificates that count no more: this list is read again whenever it changes.
ca = "ca.pem"
certificate = "certificate.pem"
key = "key.pem"
revoked = "revoked.pem"

# Who may start runs here.
$callers
# Who may fetch what a run leaves here for it, and whom this node fetches from.
$peers
# The longest run.
most_rounds = 1000
# The smallest batch: the fewer rows in a step, the more it tells about each.
least_batch = 1
# What may be run here; delete what you do not want. In its place, tables [methods.NAME] say more of each.
$methods

# What a run learns from that says data.name = "digits".
[data.digits]
# A set that everybody has, of which a run gives this node its part.
set = "digits"
# Or, in place of it, a file with rows of your own, of which nobody else ever sees one.
# rows = "mine.csv"
""")
_LISTEN = Template("""\
# Where it takes calls.
listen = "$listen"
""")
_OR_RELAY = Template("""\
# Or, in place of it, a relay that callers reach it through, if nobody can connect to this machine.
# relay = "$relay"
# relay_name = "$relay_name"
""")
_RELAYED = Template("""\
# Nobody can connect to this machine: callers reach it through a relay, which has this name in its certificate.
relay = "$relay"
relay_name = "$relay_name"
# Or, in place of both, where it takes calls.
# listen = "0.0.0.0:7443"
""")
_FEDERATION_TOML = Template("""\
# The federation as its coordinator knows it, who is one of its own: fedloom run … with this file as
# --federation. Paths are relative to it.
ca = "$me/ca.pem"
certificate = "$me/certificate.pem"
key = "$me/key.pem"
revoked = "$me/revoked.pem"

# Party k of a run lives at the k-th node, counted from 0. The names are those in their certificates.
""")
_RELAY_TOML = Template("""\
# A relay for nodes that nobody can connect to. Run it with: fedloom relay relay.toml
# It learns names, times and sizes; what passes is sealed from end to end. Paths are relative to this file.
listen = "$listen"

ca = "ca.pem"
certificate = "certificate.pem"
key = "key.pem"
revoked = "revoked.pem"

# Who may be reached through it.
$nodes
# Who may reach them: the coordinator, and nodes that fetch from each other.
$callers
# Connections of one caller, and connections to one node, at the same time.
most_open = 64
""")


class RelayAddress(NamedTuple):
    """A relay."""

    name: str
    address: str


class NodeLocation(NamedTuple):
    """How a node is reached: at an address, or through a relay."""

    address: str = ""
    relay: RelayAddress | None = None


def read(folder: Path) -> dict[str, NodeLocation]:
    """The nodes in a folder's `federation.toml`, none if there is no such file.

    Raises:
        ConfigError: it can't be read.
    """
    path = folder / FEDERATION
    if not path.exists():
        return {}
    try:
        nodes = tomllib.loads(path.read_text(encoding="utf-8")).get("nodes", [])
        return {node["name"]: _place(node) for node in nodes}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} can't be added to ({error}); mend it first") from None


def _place(node: Mapping[str, str]) -> NodeLocation:
    if "relay" in node:
        return NodeLocation(relay=RelayAddress(node.get("relay_name", "relay"), node["relay"]))
    return NodeLocation(node["address"])


def federation_toml(before: str, new: Mapping[str, NodeLocation]) -> str:
    """A federation's text with more nodes; what it says already stays."""
    text = before.rstrip("\n") + "\n" if before else _FEDERATION_TOML.substitute(me=COORDINATOR)
    for name, place in new.items():
        where = {"address": place.address}
        if place.relay is not None:
            where = {"relay": place.relay.address, "relay_name": place.relay.name}
        text += f"\n[[nodes]]\n{tomli_w.dumps({'name': name, **where})}"
    return text


def node_toml(name: str, places: Mapping[str, NodeLocation], methods: Iterable[str], relay: RelayAddress | None) -> str:
    """A node's config, by which all others are peers; `relay` is one that it could use."""
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
    """A relay's config, for all nodes."""
    lists = {"nodes": [*places], "callers": [COORDINATOR, *places]}
    return _RELAY_TOML.substitute(_lines(lists), listen=listening(relay.address))


def listening(address: str) -> str:
    """Where a server listens that others reach at `address`: on loopback just there, else at all of its machine's."""
    host, _, port = address.rpartition(":")
    if host in _LOOPBACK:
        return address
    return f"[::]:{port}" if ":" in host else f"0.0.0.0:{port}"


def _lines(lists: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Each list's setting as TOML."""
    return {key: tomli_w.dumps({key: values}).rstrip() for key, values in lists.items()}
