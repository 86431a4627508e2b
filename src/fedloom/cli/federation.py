"""The work of `fedloom certs`, and what it prints."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from fedloom.cli.options import plain_table
from fedloom.core.errors import ConfigError
from fedloom.core.paths import refuse_file
from fedloom.remote import config_templates as files
from fedloom.remote.certs import CA, CA_KEY, REVOKED, CertificateAuthority, write
from fedloom.remote.config_templates import COORDINATOR, FEDERATION, NODE
from fedloom.remote.credentials import endpoint, local

_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def certs(
    names: Sequence[str],
    folder: Path,
    methods: Collection[str],
    out: Console,
    *,
    days: int = 365,
    address: str | None = None,
    renew: bool = False,
) -> None:
    """Create certificates and configs: a folder for each node, and one for the coordinator.

    The first call creates the CA; further calls add nodes to the same federation.

    Args:
        names: of the nodes.
        folder: of the federation.
        methods: names of the methods that the nodes' configs allow.
        out: for the summary.
        days: until the certificates expire.
        address: `host:port` of the coordinator, which nodes dial; by default that of an earlier call, or port 7443 of
            this machine.
        renew: create new certificates for existing names and keep their configs.

    Raises:
        ConfigError: a name is invalid, exists already, or does not exist to renew; nothing was written.
    """
    refuse_file(folder)
    authority = CertificateAuthority(folder) if (folder / CA).exists() else None
    _check_names(names, folder)
    (_check_existing if renew else _check_new)(names, folder, authority)
    if not 0 < days <= 3650:
        raise ConfigError(f"days must be from 1 to 3650, not {days}")
    before, listen = files.read(folder)
    address = address or listen
    if isinstance(endpoint(address), str) or address.startswith(("0.0.0.0:", "[::]:")):
        raise ConfigError(f"nodes cannot dial {address}; give --address HOST:PORT of the coordinator's machine")
    authority = authority or CertificateAuthority.create(folder)
    new = [name for name in names if name not in {COORDINATOR, *before}]
    certified = [*([] if (folder / COORDINATOR).exists() or COORDINATOR in names else [COORDINATOR]), *names]
    for name in certified:
        _write_credentials(authority, name, days)
    for name in names:
        peers = [other for other in (*before, *new) if other != name]
        if name != COORDINATOR and not (folder / name / NODE).exists():
            write(folder / name / NODE, files.node_toml(name, address, peers, methods).encode())
    text = (folder / FEDERATION).read_text(encoding="utf-8") if (folder / FEDERATION).exists() else ""
    write(folder / FEDERATION, files.federation_toml(text, address, new).encode())
    _print_summary(folder, certified, address, methods if new else (), out)
    if before and new:
        out.print(f"Add {', '.join(new)} to peers in node.toml of {', '.join(before)}, and start these again.")


def revoke(names: Sequence[str], folder: Path, out: Console) -> None:
    """Revoke all certificates of these names, and copy the new list to every folder here.

    Raises:
        ConfigError: the CA is not here, or has issued no certificate for a name; nothing was written.
    """
    authority = CertificateAuthority(folder)
    known = {one.name for one in authority.issued()}
    if not names:
        raise ConfigError("give the names of the nodes whose certificates to revoke")
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} has no certificate of this CA; names with one: {', '.join(sorted(known))}")
    for name in names:
        count = authority.revoke(name)
        out.print(f"{name}: {count} certificate{'s' * (count != 1)} revoked" if count else f"{name} is revoked already")
    listed = (folder / REVOKED).read_bytes()
    for copy in sorted(folder.glob(f"*/{REVOKED}")):
        write(copy, listed)
    out.print(f"Copy {folder / REVOKED} to all other machines; each uses it as soon as it is copied.", soft_wrap=True)


def _check_names(names: Sequence[str], folder: Path) -> None:
    if not names:
        raise ConfigError("give the names of the nodes, such as: fedloom certs hospital-a hospital-b --out fed")
    for name in names:
        if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name) or (folder / name).is_file():
            raise ConfigError(
                f"a name must have lower-case letters, digits and hyphens, such as hospital-a, not {name!r}"
            )
    if len(set(names)) < len(names):
        raise ConfigError("give each node a name of its own")


def _check_new(names: Sequence[str], folder: Path, authority: CertificateAuthority | None) -> None:
    if COORDINATOR in names:
        raise ConfigError(f"remove {COORDINATOR} from the names: it gets a certificate anyway; renew it with --renew")
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name in issued or (folder / name).exists():
            raise ConfigError(f"{name} has a certificate or a folder already; renew its certificate with --renew")


def _check_existing(names: Sequence[str], folder: Path, authority: CertificateAuthority | None) -> None:
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name not in issued:
            raise ConfigError(f"{folder} has no certificate of {name} to renew; create one without --renew")


def _write_credentials(authority: CertificateAuthority, name: str, days: int) -> None:
    """Write a new certificate, its key, the CA and the revocation list to the folder of a name."""
    folder = authority.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    certificate, key = authority.issue(name, days)
    write(folder / "key.pem", key, secret=True)
    write(folder / "certificate.pem", certificate)
    for shared in (CA, REVOKED):
        write(folder / shared, (authority.folder / shared).read_bytes())


def _print_summary(
    folder: Path, certified: Sequence[str], address: str, methods: Collection[str], out: Console
) -> None:
    table = plain_table("name", "folder")
    for name in certified:
        table.add_row(name, str(folder / name))
    out.print(table)
    lines = [f"written  {folder / FEDERATION}", f"Nodes dial {address}; they need no open port."]
    if local(address):
        lines.append("Only this machine can reach that address: give --address HOST:PORT for nodes on other machines.")
    if methods:
        lines.append(f"Nodes allow {', '.join(sorted(methods))}: change methods in {NODE} to allow others.")
    lines += [
        f"Copy each folder to its own machine, and remove it here. Keep {folder / CA_KEY} to yourself: whoever has it "
        "can impersonate any party."
    ]
    for line in lines:
        out.print(line, soft_wrap=True)
