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
    names: Annotated[list[str] | None, typer.Argument(metavar="NODE...", help="What the nodes are called.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("federation"),
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=HOST:PORT", help="Where a node takes calls. Default: ports of this machine."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The first of these ports.")] = 7443,
    relay: Annotated[str | None, typer.Option(metavar="NAME", help="Make a certificate for a relay, too.")] = None,
    behind: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node that is reached through the relay. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long certificates are good.")] = 365,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take back the certificates of these nodes.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Make new certificates for nodes that are there.")] = False,
) -> None:
    """Make what a small federation needs: a CA, a certificate and a config for each node and for the coordinator.

    [bold]fedloom certs hospital-a hospital-b --out fed[/]

    Then, on each machine with its folder (fed/hospital-a, …): [bold]fedloom node node.toml[/]

    and on the coordinator's: [bold]fedloom run fedal --federation fed/federation.toml[/]

    [bold]fedloom certs hospital-c --out fed[/]  adds a node. Keep fed/ca.key to yourself.

    [bold]fedloom certs hospital-b --revoke --out fed[/]  takes its certificate back: copy revoked.pem to all machines.

    Organisations with a PKI of their own use that instead: docs/net.md says what a certificate must have.
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
        bool, typer.Option("--insecure", help="Take calls without certificates, at a loopback address only.")
    ] = False,
    log: Annotated[str, typer.Option(metavar="text|json", help="How log lines look.")] = "text",
) -> None:
    """Take part in runs, beside your own data, until Ctrl-C.

    [bold]fedloom node fed/hospital-a/node.toml[/]

    The file says which methods and data a run may use, who may start one, and how long, how small and how noisy its
    steps must be. What does not fit is refused with a reason. No code comes over the wire, and no row leaves.

    What was answered to whom is in STATE/audit.jsonl. A node that was killed goes on from its own state.
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
            f"{config}: insecure must be asked for twice, in the file and by --insecure; or in neither, with "
            "certificates, which fedloom certs makes"
        )
    methods, data = brief(tuple(cfg.methods)), ", ".join(cfg.data)

    def ready(there: server.NodeServer) -> None:
        where = f"127.0.0.1:{there.port}" if cfg.relay is None and (cfg.listen or "").endswith(":0") else cfg.listen
        out.print(f"[bold]{cfg.name}[/] takes calls at {where or f'{cfg.relay} (relay)'} from {', '.join(cfg.callers)}")
        out.print(
            f"methods  {methods}\ndata     {data}\nstate    {cfg.state}\naudit    {there.host.audit.path}",
            soft_wrap=True,
        )

    asyncio.run(server.run(cfg, ready))


def relay(
    config: Annotated[
        Path, typer.Argument(metavar="RELAY.toml", help="The relay's config, or its folder: see fedloom certs --relay.")
    ],
    log: Annotated[str, typer.Option(metavar="text|json", help="How log lines look.")] = "text",
) -> None:
    """Let nodes be reached that can't take calls: they keep one connection to here. It sees sealed bytes only.

    [bold]fedloom certs hospital-a hospital-b --relay relay --behind hospital-b --out fed[/]

    [bold]fedloom relay fed/relay/relay.toml[/]
    """
    work = _net("fedloom.cli.federation")
    _log_as(log)
    work.relay(config / "relay.toml" if config.is_dir() else config, out)


def brief(names: Sequence[str]) -> str:
    """Names for a person: all of them if they are few, or else the first, and how many they are."""
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:5])}, … ({len(names)})"


def _log_as(how: str) -> None:
    """Begin the log of a process that is left running."""
    from fedloom.remote.node import logs  # which needs no PyTorch, as a relay has none

    if how not in ("text", "json"):
        raise ConfigError(f"--log is text or json, not {how!r}")
    logs.begin(how)


def _net(module: str) -> Any:
    """A module of the net, which needs an extra."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(f"this needs an extra ({error}): pip install 'fedloom[net]'") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not name or not address:
        raise ConfigError(f"--address takes NODE=HOST:PORT, not {text!r}")
    return name, address
