"""Templates of the configs that `fedloom certs` writes."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

import tomli_w

from fedloom.core.errors import ConfigError

COORDINATOR = "coordinator"
FEDERATION, NODE = "federation.toml", "node.toml"
ADDRESS = "127.0.0.1:7443"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_NODE_TOML = Template("""\
# A node of the federation. Run it with: fedloom node node.toml
# It is the node's policy. Paths are relative to this file.
name = "$name"  # as in its certificate

# The state of its runs. Keep this folder, readable by its owner only.
state = "state"

# The federation's CA, the node's certificate, its key (fedloom certs --request makes it, and it never leaves this
# machine), and the list of revoked certificates, which is read again whenever it changes.
ca = "ca.pem"
certificate = "certificate.pem"
key = "key.pem"
revoked = "revoked.pem"

# Coordinators that may start runs here, with the addresses that this node dials. It needs no open port.
callers = { $coordinator = "$address" }
# Peers that exchange messages with this node.
$peers
# A run on rows of your own waits until fedloom node node.toml --approve RUN: "ask", "auto" (not for equal runs), "off".
approve = "ask"
# Limit of a run's rounds.
max_rounds = 1000
# Smallest batch size: the fewer rows in a step, the more it reveals about each.
min_batch_size = 1
# Allowed methods; delete those that you do not want. Tables [methods.NAME] instead set conditions on settings.
$methods

# The data of runs with data.name = "digits".
[data.digits]
# A public data set, of which a run assigns this node its part.
dataset = "digits"
# Or, instead, a file with rows of your own, which never leave this node.
# rows = "mine.csv"
# keep = ["age", "pressure"]  # columns that runs may use as input
# label = "outcome"  # that runs may use
# classes = ["well", "ill"]  # its words
# categories.ward = ["north", "south", "?"]  # the words of each column that is a category; ? is a missing one
# encode.notes = "text"  # columns of texts or dates
# lacks = ["thal"]  # columns that this file does not have, and that a run may take as missing here
# score = false  # whether models may be scored on held-out rows of this file
""")  # noqa: E501
_FEDERATION_TOML = Template("""\
# The coordinator's federation: give this file to fedloom run as --federation. Paths are relative to it.
ca = "$me/ca.pem"
certificate = "$me/certificate.pem"
key = "$me/key.pem"
revoked = "$me/revoked.pem"

# The address that the coordinator listens at while a run is under way. Nodes dial it.
listen = "$listen"

# Party k of a run is at the k-th node, counted from 0. Names are those in their certificates.
""")  # noqa: E501


def read(folder: Path) -> tuple[list[str], str]:
    """The names of the nodes in a folder's `federation.toml`, none if the file does not exist; and
    its address.

    Raises:
        ConfigError: the file is invalid.
    """
    path = folder / FEDERATION
    if not path.exists():
        return [], ADDRESS
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return [node["name"] for node in values.get("nodes", [])], values["listen"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is invalid ({error}); fix it first") from None


def federation_toml(before: str, address: str, new: Iterable[str]) -> str:
    """The text of a federation's file with further nodes appended."""
    text = before.rstrip("\n") + "\n"
    if not before:
        text = _FEDERATION_TOML.substitute(me=COORDINATOR, listen=listening(address))
    return text + "".join(f"\n[[nodes]]\n{tomli_w.dumps({'name': name})}" for name in new)


def node_toml(name: str, address: str, peers: Sequence[str], methods: Iterable[str]) -> str:
    """A node's config, with the coordinator's address."""
    lists = {"peers": peers, "methods": sorted(methods)}
    lines = {key: tomli_w.dumps({key: values}).rstrip() for key, values in lists.items()}
    return _NODE_TOML.substitute(lines, name=name, coordinator=COORDINATOR, address=address)


def listening(address: str) -> str:
    """The address to listen at for `address`: the same on loopback, otherwise all interfaces."""
    host, _, port = address.rpartition(":")
    if host in _LOOPBACK:
        return address
    return f"[::]:{port}" if ":" in host else f"0.0.0.0:{port}"
