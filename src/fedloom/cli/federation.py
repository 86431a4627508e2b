"""The work of `fedloom certs`, and what it prints.

The folder of a federation has ca.pem and ca.key (the CA), revoked.pem (the list of revoked
certificates), federation.toml for the coordinator, and a folder for each node and the coordinator,
to be handed out: with ca.pem, revoked.pem, node.toml, and, where keys are made here, key.pem and
certificate.pem. Otherwise a site makes its key (`request`), and its certificate is made of the
request here (`sign`).
"""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rich.console import Console

from fedloom.cli.options import plain_table
from fedloom.core.errors import ConfigError
from fedloom.remote import config_templates as files
from fedloom.remote.certs import (
    CA,
    CA_KEY,
    DAYS,
    LIST_DAYS,
    REVOKED,
    ROLES,
    CertificateAuthority,
    make_request,
    read_request,
    write,
)
from fedloom.remote.config_templates import COORDINATOR, FEDERATION, NODE
from fedloom.remote.credentials import endpoint, local
from fedloom.support.paths import refuse_file

_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
Password = Callable[[bool], str]
"""Asks for the password of the CA's key; True for a new one."""


def certs(
    names: Sequence[str],
    folder: Path,
    methods: Collection[str],
    out: Console,
    *,
    password: Password = lambda new: "",
    days: int = DAYS,
    address: str | None = None,
    renew: bool = False,
    here: bool = False,
) -> None:
    """Create a CA, configs, and the coordinator's certificate: a folder for each node, and one for
    the coordinator.

    The first call creates the CA; further calls add nodes to the same federation. Nodes make their
    keys themselves, see `request`, unless `here`.

    Args:
        names: of the nodes.
        folder: of the federation.
        methods: names of the methods that the nodes' configs allow.
        out: for the summary.
        password: of the CA's key.
        days: until the certificates expire.
        address: `host:port` of the coordinator, which nodes dial; by default that of an earlier
            call, or port 7443 of this machine.
        renew: create new certificates for existing names and keep their configs.
        here: create the keys of all nodes here, and a CA whose key has no password: for tests.

    Raises:
        ConfigError: a name is invalid, exists already, or does not exist to renew; nothing was
            written.
    """
    # All checks come before anything is written. The CA of an earlier call is opened, which asks
    # for its password: it knows for whom there are certificates.
    # `refuse_file`: neither the folder nor one above it may be a file
    refuse_file(folder)
    _check_names(names, folder)
    authority = _authority(folder, password) if (folder / CA).exists() else None
    (_check_existing if renew else _check_new)(names, folder, authority)
    # a new certificate is made with a new key; a node that made its key at its site would go on
    # with the old one, to which the certificate does not belong
    away = [
        name for name in names if renew and not here and not (folder / name / "key.pem").exists()
    ]
    if away:
        raise ConfigError(
            f"the key of {away[0]} is not here: run fedloom certs --request {away[0]} at its "
            "site, and --sign here; or make a new key here with --all-here"
        )
    _check_days(days)
    before, listen = files.read(folder)  # nodes of earlier calls, and the coordinator's address
    address = address or listen
    # `endpoint` returns a text if the address is none; and a coordinator may listen at 0.0.0.0, but
    # nobody can dial that
    if isinstance(endpoint(address), str) or address.startswith(("0.0.0.0:", "[::]:")):
        raise ConfigError(
            f"nodes cannot dial {address}; give --address HOST:PORT of the coordinator's machine"
        )

    # the CA, in the first call; later calls renew its list, which is valid for days only
    authority = authority or CertificateAuthority.create(folder, "" if here else password(True))
    authority.refresh()

    # the credentials: of the coordinator in the first call, and of nodes whose keys are made here
    new = [name for name in names if name not in {COORDINATOR, *before}]
    certified = [
        *([] if (folder / COORDINATOR).exists() or COORDINATOR in names else [COORDINATOR]),
        *names,
    ]
    for name in certified:
        if here or renew or name == COORDINATOR:
            _write_credentials(authority, name, days)
    _hand_out(folder, certified)  # copies ca.pem and revoked.pem to each folder

    # the configs; that of a node that exists is its site's, and stays
    for name in names:
        peers = [other for other in (*before, *new) if other != name]
        if name != COORDINATOR and not (folder / name / NODE).exists():
            write(folder / name / NODE, files.node_toml(name, address, peers, methods).encode())
    text = (
        (folder / FEDERATION).read_text(encoding="utf-8") if (folder / FEDERATION).exists() else ""
    )
    write(folder / FEDERATION, files.federation_toml(text, address, new).encode())
    # methods are named where configs with them were written; keys lie here if `here` or renewed
    _print_summary(folder, certified, address, methods if new else (), out, here=here or renew)
    # nodes accept as peers only those that their own config names
    if before and new:
        out.print(
            f"Add {', '.join(new)} to peers in node.toml of {', '.join(before)}, and start these "
            "again."
        )


def request(name: str, roles: Sequence[str], folder: Path, out: Console) -> None:
    """Make a key at a site, which never leaves it, and a request for its certificate.

    Args:
        name: of the site or person.
        roles: that the certificate shall have.
        folder: to write to.
        out: for the fingerprint.

    Raises:
        ConfigError: the name or a role is invalid, or the key that is there cannot be used.
    """
    refuse_file(folder)
    _check_name(name)
    if unknown := [role for role in roles if role not in ROLES]:
        raise ConfigError(f"--role: there is no role {unknown[0]!a}; roles are {', '.join(ROLES)}")
    old = (folder / "key.pem").exists()
    made = make_request(name, roles, folder)
    for line in (
        f"{'kept    ' if old else 'written '} {folder / 'key.pem'}: it stays on this machine",
        f"written  {folder / 'request.pem'}: send it to the CA's owner, who runs fedloom certs "
        "--sign request.pem",
        f"fingerprint of the key: {made.fingerprint}",
        "Tell them the fingerprint by phone. Put the certificate.pem that they send beside the "
        "key.",
    ):
        out.print(line, soft_wrap=True, markup=False)


def sign(
    file: Path,
    folder: Path,
    out: Console,
    *,
    password: Password,
    sure: Callable[[], bool],
    days: int = DAYS,
) -> None:
    """Sign a site's request, and write its certificate to its folder here.

    Args:
        file: the request.
        folder: of the CA.
        out: for what is asked for, and where the certificate is.
        password: of the CA's key.
        sure: whether to sign, after the name and the fingerprint were printed.
        days: until the certificate expires.

    Raises:
        ConfigError: the file is no sound request, or the CA cannot be used; nothing was written.
    """
    asked = read_request(file)
    _check_name(asked.name)
    _check_days(days)
    authority = _authority(folder, password)
    before = [one for one in authority.issued() if one.name == asked.name and not one.revoked]
    lines = [f"name         {asked.name}", f"roles        {', '.join(asked.roles) or 'none'}"]
    lines += [f"fingerprint  {asked.fingerprint}"]
    if before:
        lines.append(
            f"{asked.name} has a certificate until {before[-1].ends}; this is a further one."
        )
    if asked.name == COORDINATOR or "submit" in asked.roles:
        lines.append("Its owner will be able to start runs at nodes that name it in callers.")
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
    if not sure():
        out.print("not signed")
        return
    authority.refresh()
    place = folder / asked.name
    place.mkdir(mode=0o700, exist_ok=True)
    write(place / "certificate.pem", authority.sign(asked, days))
    _hand_out(folder, [asked.name])
    out.print(
        f"written  {place / 'certificate.pem'}: send it back, with {CA} and {REVOKED} beside it",
        soft_wrap=True,
    )
    if asked.name not in (COORDINATOR, *files.read(folder)[0]) and not asked.roles:
        out.print(
            f"{folder / FEDERATION} has no node {asked.name}: add it with fedloom certs "
            f"{asked.name}"
        )


def renew_list(folder: Path, out: Console, password: Password) -> None:
    """Sign the list of revoked certificates again, and copy it to every folder here."""
    _authority(folder, password).refresh()
    _hand_out(folder, [path.parent.name for path in folder.glob(f"*/{REVOKED}")])
    out.print(
        f"valid for {LIST_DAYS} days: copy {folder / REVOKED} to all machines", soft_wrap=True
    )


def revoke(
    names: Sequence[str], folder: Path, out: Console, password: Password = lambda new: ""
) -> None:
    """Revoke all certificates of these names, and copy the new list to every folder here.

    Raises:
        ConfigError: the CA is not here, or has issued no certificate for a name; nothing was
            written.
    """
    authority = _authority(folder, password)
    known = {one.name for one in authority.issued()}
    if not names:
        raise ConfigError("give the names of the nodes whose certificates to revoke")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{name!r} has no certificate of this CA; names with one: "
                f"{', '.join(sorted(known))}"
            )
    for name in names:
        count = authority.revoke(name)
        out.print(
            f"{name}: {count} certificate{'s' * (count != 1)} revoked"
            if count
            else f"{name} is revoked already"
        )
    _hand_out(folder, [path.parent.name for path in folder.glob(f"*/{REVOKED}")])
    out.print(
        f"Copy {folder / REVOKED} to all other machines; each uses it as soon as it is copied.",
        soft_wrap=True,
    )


def _authority(folder: Path, password: Password) -> CertificateAuthority:
    return CertificateAuthority(folder, lambda: password(False))


def _check_days(days: int) -> None:
    if not 0 < days <= 3650:
        raise ConfigError(f"days must be from 1 to 3650, not {days}")


def _check_name(name: str) -> None:
    if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name):
        raise ConfigError(
            "a name must have lower-case letters, digits and hyphens, such as hospital-a, not "
            f"{name!a}"
        )


def _check_names(names: Sequence[str], folder: Path) -> None:
    if not names:
        raise ConfigError(
            "give the names of the nodes, such as: fedloom certs hospital-a hospital-b --out fed"
        )
    for name in names:
        _check_name("" if (folder / name).is_file() else name)
    if len(set(names)) < len(names):
        raise ConfigError("give each node a name of its own")


def _check_new(names: Sequence[str], folder: Path, authority: CertificateAuthority | None) -> None:
    if COORDINATOR in names:
        raise ConfigError(
            f"remove {COORDINATOR} from the names: it gets a certificate anyway; renew it with "
            "--renew"
        )
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name in issued or (folder / name).exists():
            raise ConfigError(
                f"{name} has a certificate or a folder already; renew its certificate with --renew"
            )


def _check_existing(
    names: Sequence[str], folder: Path, authority: CertificateAuthority | None
) -> None:
    issued = {one.name for one in authority.issued()} if authority is not None else set()
    for name in names:
        if name not in issued:
            raise ConfigError(
                f"{folder} has no certificate of {name} to renew; create one without --renew"
            )


def _write_credentials(authority: CertificateAuthority, name: str, days: int) -> None:
    """Write a new certificate and its key to the folder of a name. A coordinator starts runs."""
    folder = authority.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    certificate, key = authority.issue(name, days, ("submit",) if name == COORDINATOR else ())
    write(folder / "key.pem", key, secret=True)
    write(folder / "certificate.pem", certificate)


def _hand_out(folder: Path, names: Sequence[str]) -> None:
    """Copy the CA's certificate and its list of revoked ones to the folders of these names."""
    for name in names:
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        for shared in (CA, REVOKED):
            write(folder / name / shared, (folder / shared).read_bytes())


def _print_summary(
    folder: Path,
    certified: Sequence[str],
    address: str,
    methods: Collection[str],
    out: Console,
    *,
    here: bool,
) -> None:
    table = plain_table("name", "folder")
    for name in certified:
        table.add_row(name, str(folder / name))
    out.print(table)
    lines = [f"written  {folder / FEDERATION}", f"Nodes dial {address}; they need no open port."]
    if local(address):
        lines.append(
            "Only this machine can reach that address: give --address HOST:PORT for nodes on "
            "other machines."
        )
    if methods:
        lines.append(
            f"Nodes allow {', '.join(sorted(methods))}: change methods in {NODE} to allow others."
        )
    keep = f"Keep {folder / CA_KEY} to yourself: whoever has it can impersonate any party."
    if here:
        lines += [f"Copy each folder to its own machine, and remove it here: it has a key. {keep}"]
    else:
        sites = [name for name in certified if name != COORDINATOR]
        lines += [f"Send each node's folder to its site; it holds no secret. {keep}"]
        lines += [f"In it, the site runs: fedloom certs --request {name}" for name in sites]
        lines += [f"Then, here: fedloom certs --sign request.pem --out {folder}"] if sites else []
    lines += [
        f"The list of revoked certificates is valid for {LIST_DAYS} days: renew it with fedloom "
        "certs --list."
    ]
    for line in lines:
        out.print(line, soft_wrap=True)
