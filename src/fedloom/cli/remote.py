"""The command line between organizations: `fedloom certs`, `fedloom node`.

Both need the extra `net`, whose modules are imported when a command runs: `_net` says how to
install it. What a node is asked to do besides taking part (`--runs`, `--approve`, `--budget` and so
on) works on the files of its state folder, and ends.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.help import Commands, OneCommand
from fedloom.cli.listing import listing
from fedloom.cli.options import PRIVATE, LogFormat, out
from fedloom.core.errors import ConfigError, EngineError, did_you_mean

SHORTEST = 12
"""Characters of the password of a CA's key."""
GRACE = 4.0
"""Seconds that a node may take to end after SIGTERM, SIGHUP or Ctrl-C."""


def certs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NODE...", help="Names of the nodes.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The federation's folder. Default: federation; with --request this folder.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The coordinator's address, which nodes dial. Default: this machine.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD", help="A method that the nodes allow. Repeatable. Default: fedal."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificates expire.")] = 30,
    all_here: Annotated[
        bool,
        typer.Option(
            "--all-here",
            help="Make the keys of all nodes here, and none with a password: for tests.",
        ),
    ] = False,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="At a site: make its key, and a request for its certificate."
        ),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE", help="With --request: submit, approve, stop or audit. Repeatable."
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sign a site's request, once its fingerprint was compared."
        ),
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Revoke the certificates of these nodes.")
    ] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Create new certificates for existing nodes.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Renew the list of revoked certificates.")
    ] = False,
) -> None:
    """Create a CA, the coordinator's certificate, and a config for each node; sign what nodes
    request.

    On one machine, for a test: [bold]fedloom certs hospital-a hospital-b --all-here --out fed[/]

    Between organizations: [bold]fedloom certs hospital-a hospital-b --address fed.example.org:7443
        --out fed[/]

    at each site, in the folder that it got: [bold]fedloom certs --request hospital-a[/]

    and again here: [bold]fedloom certs --sign request.pem --out fed[/]

    Then, at each site: [bold]fedloom node node.toml[/]

    and on the coordinator's machine: [bold]fedloom run fedal --federation fed/federation.toml[/]

    [bold]fedloom certs hospital-c --out fed[/]  adds a node. Keep fed/ca.key to yourself.

    [bold]fedloom certs hospital-b --revoke --out fed[/]  revokes its certificate: copy revoked.pem
    to all machines.

    [bold]fedloom certs --list --out fed[/]  renews the list of revoked certificates, which is valid
    for 7 days.

    An existing PKI can replace the CA: see docs/net.md for what a certificate must have.
    """
    work = _net("fedloom.cli.federation")
    os.umask(PRIVATE)
    kinds = {
        "--request": request is not None,
        "--sign": sign is not None,
        "--revoke": revoke,
        "--list": list_,
    }
    if len(given := [kind for kind, there in kinds.items() if there]) > 1:
        raise ConfigError(f"give {given[0]} or {given[1]}, not both")
    if request is not None:
        work.request(request, role or (), folder or Path(), out)
        return
    if role:
        raise ConfigError("--role goes with --request")
    folder = folder or Path("federation")
    if sign is not None:
        work.sign(
            sign, folder, out, password=_password, sure=lambda: typer.confirm("Sign it?"), days=days
        )
        return
    if revoke:
        work.revoke(names or (), folder, out, _password)
        return
    if list_:
        work.renew_list(folder, out, _password)
        return
    methods, known = method or ["fedal"], listing()["params"]
    for name in methods:
        if name not in known:
            raise ConfigError(f"--method: there is no method {name!r}.{did_you_mean(name, known)}")
    work.certs(
        names or (),
        folder,
        methods,
        out,
        password=_password,
        days=days,
        address=address,
        renew=renew,
        here=all_here,
    )


def _password(new: bool) -> str:
    """Ask for the password of the CA's key, twice for a new one."""
    least = f", at least {SHORTEST} characters" if new else ""
    text: str = typer.prompt(
        f"Password of the CA's key{least}", hide_input=True, confirmation_prompt=new
    )
    if new and len(text) < SHORTEST:
        raise ConfigError(f"the password must have at least {SHORTEST} characters")
    return text


def node(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="NODE.toml", help="The node's config, or its folder: see fedloom certs."
        ),
    ],
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Run without certificates, at a loopback address only."),
    ] = False,
    budget: Annotated[
        bool,
        typer.Option("--budget", help="Print the privacy budget of the node's rows, and exit."),
    ] = False,
    accept_restored: Annotated[
        bool,
        typer.Option(
            "--accept-restored",
            help="Use a restored state again, with all limits counted, and exit.",
        ),
    ] = False,
    new_anchor: Annotated[
        bool,
        typer.Option(
            "--new-anchor", help="Make the file of anchor, as no earlier budget was lost, and exit."
        ),
    ] = False,
    runs: Annotated[
        bool,
        typer.Option("--runs", help="List the runs that wait or were decided about, and exit."),
    ] = False,
    approve: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Show what a run will do here, approve it, and exit."),
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Stop a run here at once, also one that waits, and exit."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="As an auditor: check the audit log, sign its newest line, and exit."
        ),
    ] = False,
    signer: Annotated[
        Path | None,
        typer.Option(
            "--as",
            metavar="FOLDER",
            help="Who decides: the folder of a certificate, where node.toml has roles.",
        ),
    ] = None,
    log: LogFormat = "text",
) -> None:
    """Take part in runs, beside your own data, until Ctrl-C.

    [bold]fedloom node fed/hospital-a/node.toml[/]

    The file lists allowed methods, data and callers, and conditions on settings. Runs that violate
    them are refused with a reason. Nodes receive no code and send no file of
    rows; what a method sends is computed from rows, and may hold them.

    Every answer is recorded in STATE/audit.jsonl. A node that was killed continues from its own
    state.

    A run on your own rows waits until you approve it. RUN is the beginning of its id:

    [bold]fedloom node node.toml --approve 3f2a91c0[/]

    [bold]fedloom node node.toml --stop 3f2a91c0[/]  ends it here at once; --approve lets it
    continue.
    """
    _net("fedloom.remote.engine")  # first: what is imported below fails without the extra
    import asyncio

    os.umask(PRIVATE)  # files of the node, such as its state, are for its user alone
    from fedloom.remote.node import limits, privacy_ledger, process
    from fedloom.remote.node.audit import AuditLog
    from fedloom.remote.node.budget import Budget, Spent
    from fedloom.remote.node.config import read
    from fedloom.remote.node.store import lock_folder

    _log_as(log)
    config = config / "node.toml" if config.is_dir() else config
    cfg = read(config)

    # decisions about runs, which a node that is at work reads from its state folder
    if runs or confirm or approve is not None or stop is not None:
        from fedloom.cli import approval

        if runs:
            approval.show(cfg)
        elif confirm:
            approval.confirm(cfg, signer)
        elif approve is not None:
            approval.decide(cfg, approve, "approve", signer)
        elif stop is not None:
            approval.decide(cfg, stop, "stop", signer)
        return
    if signer is not None:
        raise ConfigError("--as goes with --approve, --stop or --confirm")
    # cohort -> the limits (ε, δ) on its rows: sections of the same people share one budget
    own = {
        cfg.cohort(data): (data.epsilon, data.delta)
        for data in cfg.data.values()
        if data.rows is not None
    }

    # The privacy budget. Changes lock the state folder, which a node at work holds, and are written
    # to the audit log.
    if accept_restored:
        # What was spent since the backup is lost. Nobody can say that it was less than all, so
        # every limit counts as reached.
        def exhaust(cohorts: dict[str, Spent]) -> None:
            for data in cfg.data.values():
                if data.rows is not None:
                    limits.exhaust(cohorts.setdefault(cfg.cohort(data), Spent()), data)

        with lock_folder(cfg.state):
            missing = Budget(cfg.state, cfg.anchor).accept_restored(exhaust)
            AuditLog(cfg.state / "audit.jsonl").write(
                "accepted a restored budget", cfg.name, missing=missing
            )
        out.print(
            f"The budget is in use again. It lacks {missing} changes, so all limits of each "
            "cohort are counted: the whole ε, and all scores, ids, answers and introductions."
        )
        return
    if new_anchor:
        with lock_folder(cfg.state):
            Budget(cfg.state, cfg.anchor).begin_anchor()
            AuditLog(cfg.state / "audit.jsonl").write("made an anchor", cfg.name)
        out.print(
            f"{cfg.anchor} has the number of the newest budget from now on.",
            markup=False,
            soft_wrap=True,
        )
        return
    if budget:
        for line in privacy_ledger.lines(Budget(cfg.state, cfg.anchor), own):
            out.print(line, markup=False, soft_wrap=True)
        if not own:
            out.print("no data of its own: no budget")
        return

    # Take part. Without certificates only if both the file and the command say so: neither a copied
    # file nor a habit alone shall open a node.
    if cfg.insecure != insecure:
        raise ConfigError(
            f"{config}: set insecure = true in the file and give --insecure, or neither, and "
            "create certificates with fedloom certs"
        )
    methods, data = brief(tuple(cfg.methods)), ", ".join(cfg.data)

    def ready(there: process.RunningNode) -> None:
        # a node dials each of its callers, and waits for their calls on that connection
        dialled = ", ".join(
            f"{name} at {at}" for name, addresses in cfg.callers.items() for at in addresses
        )
        out.print(f"[bold]{cfg.name}[/] takes calls of {dialled}", soft_wrap=True)
        out.print(
            f"methods  {methods}\ndata     {data}\nstate    {cfg.state}\naudit    "
            f"{there.service.audit.path}",
            soft_wrap=True,
        )
        for what, end in (
            () if there.service.credentials is None else there.service.credentials.ends.items()
        ):
            out.print(f"valid    {what} until {end:%Y-%m-%d}")

    asyncio.run(process.run_node(cfg, ready, _end_soon))


def _end_soon() -> None:
    """End this process after `GRACE` seconds even if an operation of PyTorch is still under way:
    all results are on disk, and the unfinished call changes nothing.
    """
    timer = threading.Timer(GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


audit = typer.Typer(cls=Commands, help="Check a node's audit log.", no_args_is_help=True)


@audit.command("verify", cls=OneCommand)
def verify(
    state: Annotated[
        Path, typer.Argument(metavar="STATE", help="The folder that node.toml names as state.")
    ],
    noted: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH", help="A hash that this command printed earlier. Repeatable."),
    ] = None,
) -> None:
    """Check that no line of a node's audit log, or of its log of refused calls, was changed,
    removed or inserted.

    [bold]fedloom audit verify fed/hospital-a/state[/]

    It prints the hash of the newest line of each. Note them on another machine: later, --noted HASH
    checks that the lines up to there are unchanged, even if somebody rewrote the whole log.
    """
    verify = _net("fedloom.remote.node.audit").verify
    found = verify(state, noted or ())
    out.print(f"{found.lines:,} lines are unchanged; the newest has the hash\n{found.newest}")
    if found.refusals:
        out.print(
            f"{found.refusals:,} lines of refused calls are unchanged; the newest has the hash"
        )
        out.print(found.newest_refusal)
    if found.unchained:
        out.print(f"{found.unchained:,} older lines have no hash: a version before 0.2 wrote them")
    for name, time, key in found.confirmed[-3:]:
        out.print(
            f"confirmed by {name} on {time[:16].replace('T', ' ')} UTC with the key {key}",
            markup=False,
        )
    if found.torn:
        out.print(
            f"{found.torn:,} lines are incomplete: the process was killed while it wrote them"
        )


def brief(names: Sequence[str]) -> str:
    """Names as text: up to 8 of them, or else the first 5 and the number of all."""
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:5])}, … ({len(names)})"


def _log_as(how: str) -> None:
    from fedloom.remote.node import logs

    if how not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, not {how!r}")
    logs.begin(how)


def _net(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(f"this needs an extra ({error}): pip install -e '.[net]'") from None
