"""The command line between organisations: `fedloom certs`, `fedloom node`, `fedloom relay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedloom.core.errors import ConfigError, EngineError

out = Console(highlight=False)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(certs)
    app.command()(node)
    app.command()(relay)


def certs(
    names: Annotated[list[str] | None, typer.Argument(metavar="NODE...", help="Names of the nodes.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("federation"),
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=HOST:PORT", help="A node's address. Default: ports of this machine."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The first of these ports.")] = 7443,
    relay: Annotated[str | None, typer.Option(metavar="NAME", help="Create a certificate for a relay, too.")] = None,
    behind: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node that is reached through the relay. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificates expire.")] = 365,
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke the certificates of these nodes.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Create new certificates for existing nodes.")] = False,
) -> None:
    """Create a CA, and a certificate and a config for each node and for the coordinator.

    [bold]fedloom certs hospital-a hospital-b --out fed[/]

    Then, on each machine with its folder (fed/hospital-a, …): [bold]fedloom node node.toml[/]

    and on the coordinator's: [bold]fedloom run fedal --federation fed/federation.toml[/]

    [bold]fedloom certs hospital-c --out fed[/]  adds a node. Keep fed/ca.key to yourself.

    [bold]fedloom certs hospital-b --revoke --out fed[/]  revokes its certificate: copy revoked.pem to all machines.

    An existing PKI can replace the CA: see docs/net.md for what a certificate must have.
    """
    work = _net("fedloom.cli.federation")
    if revoke:
        work.revoke(names or (), folder, out)
        return
    from fedloom.methods import registry

    addresses = dict(_pair(text) for text in address or ())
    work.certs(
        names or (),
        folder,
        [name for name, method in registry().items() if "pooled rows" not in method.needs],
        out,
        days=days,
        addresses=addresses,
        port=port,
        relay=relay,
        behind=behind or (),
        renew=renew,
    )


def node(
    config: Annotated[
        Path, typer.Argument(metavar="NODE.toml", help="The node's config, or its folder: see fedloom certs.")
    ],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Run without certificates, at a loopback address only.")
    ] = False,
    log: Annotated[str, typer.Option(metavar="text|json", help="Format of log lines.")] = "text",
) -> None:
    """Take part in runs, beside your own data, until Ctrl-C.

    [bold]fedloom node fed/hospital-a/node.toml[/]

    The file lists allowed methods, data and callers, and conditions on settings. Runs that violate them are refused
    with a reason. Nodes receive no code and send no row.

    Every answer is recorded in STATE/audit.jsonl. A node that was killed continues from its own state.
    """
    _net("fedloom.remote.engine")
    import asyncio

    from fedloom.remote.node import server
    from fedloom.remote.node.config import read

    _log_as(log)
    config = config / "node.toml" if config.is_dir() else config
    cfg = read(config)
    if cfg.insecure != insecure:
        raise ConfigError(
            f"{config}: set insecure = true in the file and give --insecure, or neither, and create certificates with "
            "fedloom certs"
        )
    methods, data = brief(tuple(cfg.methods)), ", ".join(cfg.data)

    def ready(there: server.NodeServer) -> None:
        where = f"127.0.0.1:{there.port}" if cfg.relay is None and (cfg.listen or "").endswith(":0") else cfg.listen
        out.print(f"[bold]{cfg.name}[/] listens at {where or f'{cfg.relay} (relay)'} from {', '.join(cfg.callers)}")
        out.print(
            f"methods  {methods}\ndata     {data}\nstate    {cfg.state}\naudit    {there.host.audit.path}",
            soft_wrap=True,
        )

    asyncio.run(server.run(cfg, ready))


def relay(
    config: Annotated[
        Path, typer.Argument(metavar="RELAY.toml", help="The relay's config, or its folder: see fedloom certs --relay.")
    ],
    log: Annotated[str, typer.Option(metavar="text|json", help="Format of log lines.")] = "text",
) -> None:
    """Relay calls to nodes without an open port, which connect to the relay. It sees encrypted bytes only.

    [bold]fedloom certs hospital-a hospital-b --relay relay --behind hospital-b --out fed[/]

    [bold]fedloom relay fed/relay/relay.toml[/]
    """
    work = _net("fedloom.cli.federation")
    _log_as(log)
    work.relay(config / "relay.toml" if config.is_dir() else config, out)


def brief(names: Sequence[str]) -> str:
    """Names as text: up to 8 of them, or else the first 5 and the number of all."""
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:5])}, … ({len(names)})"


def _log_as(how: str) -> None:
    """Start the log of a long-running process."""
    from fedloom.remote.node import logs  # which needs no PyTorch, as a relay has none

    if how not in ("text", "json"):
        raise ConfigError(f"--log must be text or json, not {how!r}")
    logs.begin(how)


def _net(module: str) -> Any:
    """Import a module that needs the extra `net`."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(f"this needs an extra ({error}): pip install 'fedloom[net]'") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not name or not address:
        raise ConfigError(f"--address must be NODE=HOST:PORT, not {text!r}")
    return name, address
