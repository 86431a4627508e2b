"""The work of `fedloom certs` and `fedloom relay`, and what they print."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedloom.core.errors import ConfigError
from fedloom.core.paths import refuse_file
from fedloom.remote import config_templates as files
from fedloom.remote import relay as relays
from fedloom.remote.certs import CA, CA_KEY, REVOKED, CertificateAuthority, write
from fedloom.remote.config_templates import COORDINATOR, FEDERATION, NODE, RELAY, NodeLocation, RelayAddress
from fedloom.remote.credentials import endpoint

FIRST_PORT = 7443
RELAY_ADDRESS = "127.0.0.1:7500"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def certs(
    names: Sequence[str],
    folder: Path,
    methods: Collection[str],
    out: Console,
    *,
    days: int = 365,
    addresses: Mapping[str, str] | None = None,
    port: int = FIRST_PORT,
    relay: str | None = None,
    behind: Collection[str] = (),
    renew: bool = False,
) -> None:
    """Create certificates and configs: a folder for each node, for the coordinator, and for a relay.

    The first call creates the CA; further calls add nodes or a relay to the same federation.

    Args:
        names: of the nodes.
        folder: of the federation.
        methods: names of the methods that the nodes' configs allow.
        out: for the summary.
        days: until the certificates expire.
        addresses: `host:port` by name, of nodes and the relay; others get ports of 127.0.0.1.
        port: the first of these.
        relay: the relay's name.
        behind: nodes that are reached through it.
        renew: create new certificates for existing names and keep their configs.

    Raises:
        ConfigError: a name is invalid, exists already, or does not exist to renew; nothing was written.
    """
    addresses = addresses or {}
    refuse_file(folder)
    authority = CertificateAuthority(folder) if (folder / CA).exists() else None
    _check_names(names, folder, relay)
    (_check_there if renew else _check_new)(names, folder, authority)
    _check_options(names, days, addresses, relay, behind)
    before = files.read(folder)
    authority = authority or CertificateAuthority.create(folder)
    through = None if relay is None else RelayAddress(relay, addresses.get(relay) or _relay_address(before, relay))
    nodes = [n for n in names if n not in {COORDINATOR, relay, *before} and not (folder / n / RELAY).exists()]
    new = _places(nodes, before, addresses, port, through, behind)
    others = [name for name in (COORDINATOR, relay) if name is not None and not (folder / name).exists()]
    made = list(dict.fromkeys([*others, *names]))
    for name in made:
        _write_credentials(authority, name, days)
    places = before | new
    for name in places.keys() & set(made):
        _write_new(folder / name / NODE, files.node_toml(name, places, methods, through))
    if through is not None:
        _write_new(folder / through.name / RELAY, files.relay_toml(through, places))
    text = (folder / FEDERATION).read_text(encoding="utf-8") if (folder / FEDERATION).exists() else ""
    write(folder / FEDERATION, files.federation_toml(text, new).encode())
    _print_summary(folder, places, made, through, out)
    if before and new:
        _print_updates(folder, before, new, out)


def revoke(names: Sequence[str], folder: Path, out: Console) -> None:
    """Revoke all certificates of these names, and copy the new list to every folder here.

    Raises:
        ConfigError: the CA is not here, or has issued no certificate for a name; nothing was written.
    """
    authority = CertificateAuthority(folder)
    known = {one.name for one in authority.issued()}
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} has no certificate of this CA; names with one: {', '.join(sorted(known))}")
    if not names:
        raise ConfigError("give the names of the nodes whose certificates to revoke")
    for name in names:
        count = authority.revoke(name)
        out.print(f"{name}: {count} certificate{'s' * (count != 1)} revoked" if count else f"{name} is revoked already")
    listed = (folder / REVOKED).read_bytes()
    for copy in sorted(folder.glob(f"*/{REVOKED}")):
        write(copy, listed)
    out.print(f"Copy {folder / REVOKED} to all other machines; each uses it as soon as it is copied.", soft_wrap=True)


def relay(config: Path, out: Console) -> None:
    """Run a relay until SIGINT or SIGTERM.

    Raises:
        ConfigError: its config or its certificate is invalid.
        EngineError: its port is in use.
    """
    read = relays.read(config)
    asyncio.run(_serve(relays.Relay(read), f"{read.credentials.name} relays at {read.listen}", out))


async def _serve(server: relays.Relay, words: str, out: Console) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C stops it less gently
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    out.print(words, soft_wrap=True)
    await stopped.wait()
    await server.stop()


def _check_names(names: Sequence[str], folder: Path, relay: str | None) -> None:
    if not names and relay is None:
        raise ConfigError("give the names of the nodes, such as: fedloom certs hospital-a hospital-b --out fed")
    for name in filter(None, [*names, relay]):
        if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name) or (folder / name).is_file():
            raise ConfigError(
                f"a name must have lower-case letters, digits and hyphens, such as hospital-a, not {name!r}"
            )
    if relay in names or relay == COORDINATOR or len(set(names)) < len(names):
        raise ConfigError(f"the {COORDINATOR}, the relay and the nodes need different names")


def _check_new(names: Sequence[str], folder: Path, authority: CertificateAuthority | None) -> None:
    if COORDINATOR in names:
        raise ConfigError(f"remove {COORDINATOR} from the names: it gets a certificate anyway; renew it with --renew")
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name in issued or (folder / name).exists():
            raise ConfigError(f"{name} has a certificate or a folder already; renew its certificate with --renew")


def _check_there(names: Sequence[str], folder: Path, authority: CertificateAuthority | None) -> None:
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name not in issued:
            raise ConfigError(f"{folder} has no certificate of {name} to renew; create one without --renew")


def _check_options(
    names: Sequence[str], days: int, addresses: Mapping[str, str], relay: str | None, behind: Collection[str]
) -> None:
    if not 0 < days <= 3650:
        raise ConfigError(f"days must be from 1 to 3650, not {days}")
    for name in {*addresses, *behind} - {*names, relay}:
        raise ConfigError(f"{name!r} has an address or a relay, but is not among the names; add it")
    for address in addresses.values():
        if isinstance(endpoint(address), str):
            raise ConfigError(f"{address} cannot be reached from other machines; give host:port")
    if behind and relay is None:
        raise ConfigError("--behind needs a relay: give --relay NAME")


def _places(
    nodes: Sequence[str],
    before: Mapping[str, NodeLocation],
    addresses: Mapping[str, str],
    port: int,
    relay: RelayAddress | None,
    behind: Collection[str],
) -> dict[str, NodeLocation]:
    """The addresses of the new nodes."""
    taken = {place.address for place in before.values()} | set(addresses.values())
    new = {}
    for name in nodes:
        if name in behind:
            new[name] = NodeLocation(relay=relay)
            continue
        while name not in addresses and f"127.0.0.1:{port}" in taken:
            port += 1
        new[name] = NodeLocation(addresses.get(name, f"127.0.0.1:{port}"))
        taken.add(new[name].address)
    return new


def _relay_address(before: Mapping[str, NodeLocation], relay: str) -> str:
    """The relay's address in existing configs, or else the default."""
    known = {place.relay.name: place.relay.address for place in before.values() if place.relay is not None}
    return known.get(relay, RELAY_ADDRESS)


def _write_credentials(authority: CertificateAuthority, name: str, days: int) -> None:
    """Write a new certificate, its key, the CA and the revocation list to the folder of a name."""
    folder = authority.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    certificate, key = authority.issue(name, days)
    write(folder / "key.pem", key, secret=True)
    write(folder / "certificate.pem", certificate)
    for shared in (CA, REVOKED):
        write(folder / shared, (authority.folder / shared).read_bytes())


def _write_new(path: Path, text: str) -> None:
    """Write a config, unless it exists."""
    if not path.exists():
        write(path, text.encode())


def _print_summary(
    folder: Path, places: Mapping[str, NodeLocation], made: Sequence[str], relay: RelayAddress | None, out: Console
) -> None:
    table = Table("name", "reached at", "folder", box=None, header_style="bold", pad_edge=False)
    for name in made:
        place = places.get(name, NodeLocation(relay.address if relay is not None and name == relay.name else ""))
        at = place.address if place.relay is None else f"{place.relay.address}, the relay"
        table.add_row(name, at, str(folder / name))
    out.print(table)
    out.print(f"written  {folder / FEDERATION}", soft_wrap=True)
    out.print(
        f"Copy each folder to its own machine, and remove it here. Keep {folder / CA_KEY} to yourself: whoever has it "
        "can impersonate any party.",
        soft_wrap=True,
    )


def _print_updates(folder: Path, before: Collection[str], new: Collection[str], out: Console) -> None:
    """Print the changes that earlier nodes and relays need for new nodes."""
    names = ", ".join(new)
    out.print(f"Add {names} to peers in node.toml of {', '.join(before)}, and start these again.", soft_wrap=True)
    for file in sorted(folder.glob(f"*/{RELAY}")):
        if not set(new) <= set(relays.read(file).callers):
            out.print(f"Add {names} to nodes and callers in {file}, and start the relay again.", soft_wrap=True)
