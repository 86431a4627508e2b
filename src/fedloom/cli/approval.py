"""The work of `fedloom node --runs`, `--approve` and `--stop`: a site's decisions about runs."""

from pathlib import Path

import typer

from fedloom.cli.options import out, plain_table
from fedloom.core.errors import ConfigError, PrivacyBudgetSpent
from fedloom.remote.node import approval, privacy_ledger
from fedloom.remote.node.audit import verify
from fedloom.remote.node.budget import Budget
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.decision import What
from fedloom.remote.node.terms import sha256

_WORDS = {"waits": "waits", "approve": "approved", "stop": "stopped"}


def show(config: NodeConfig) -> None:
    """Print the runs that wait here or were decided about."""
    found = approval.runs(config.state)
    if not found:
        out.print("no run has asked for approval")
        return
    table = plain_table("run", "coordinator", "since (UTC)", "state", "what")
    for one, decided in found:
        first = one.text.partition("\n")[0]
        table.add_row(
            one.run[:8], one.caller, one.since[:16].replace("T", " "), _WORDS[decided], first
        )
    out.print(table)


def decide(config: NodeConfig, run: str, what: What, signer: Path | None) -> None:
    """Show a run, ask, and record the decision.

    Args:
        config: the node's.
        run: the beginning of its id.
        what: approve or stop.
        signer: the folder of the certificate of whoever decides; None where node.toml has no roles.

    Raises:
        ConfigError: no such run, or the role is missing; nothing was recorded.
    """
    who = approval.holder(config, signer, what)
    found = approval.find(config.state, run)
    if what == "approve":
        out.print(
            f"Run {found.run} of {found.caller}, since {found.since}:\n",
            markup=False,
            soft_wrap=True,
        )
        out.print(found.text, markup=False, soft_wrap=True)
        for line in _spent(config):
            out.print(f"Spent so far: {line}", markup=False, soft_wrap=True)
        out.print(f"\nsummary  {sha256(found.text)}")
        if not typer.confirm("Approve it?"):
            out.print("not approved; it waits")
            return
    approval.decide(config.state, found, what, who)
    by = f" by {who.name}" if who is not None else ""
    if what == "approve":
        out.print(f"approved{by}: run {found.run[:8]} may begin, or continue")
    else:
        out.print(
            f"stopped{by}: run {found.run[:8]} ends here within a second. What it was sent "
            "cannot be called back."
        )


def confirm(config: NodeConfig, signer: Path | None) -> None:
    """Check the audit log, and sign the hash of its newest line; the node's process writes that
    into the log.

    Raises:
        ConfigError: nobody has the role audit, or the certificate is not theirs.
        CheckpointError: the log was edited; nothing was signed.
    """
    who = approval.holder(config, signer, "audit")
    if who is None:
        raise ConfigError(
            "--confirm needs somebody with the role audit: name them in roles of node.toml, as "
            '["audit"]'
        )
    found = verify(config.state)
    approval.confirm(config.state, found.newest, who)
    out.print(
        f"{found.lines:,} lines are unchanged; confirmed by {who.name} up to the "
        f"hash\n{found.newest}"
    )


def _spent(config: NodeConfig) -> list[str]:
    own = {
        config.cohort(data): (data.epsilon, data.delta)
        for data in config.data.values()
        if data.rows is not None
    }
    try:
        return [*privacy_ledger.lines(Budget(config.state, config.anchor), own)]
    except PrivacyBudgetSpent as error:
        return [str(error)]
