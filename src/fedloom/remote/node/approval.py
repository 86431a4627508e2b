"""Decisions of a site about runs: a run on own rows waits until it is approved, and can be stopped
at once.

In `STATE/approval` the node writes what waits (`RUN.waiting`), a command writes a decision
(`RUN.decision`), and the node keeps what it accepted (`accepted.json`). Where `roles` of node.toml
names who decides, a decision counts only if it is signed by the key of a certificate with that name
and role.

A coordinator opens a run again and again until it may begin. A site is shown `text`
(`terms.summary`), and approves the hash of it, so that the run with another text waits again:

    unknown --opened, with a text--> waiting --decision "approve" of this text--> approved
       |                                ^                                          |   ^
       |                                +-------- opened with another text --------+   |
       |                                                                               |
       +--opened with a text that was accepted before, and approve = "auto" -----------+
       |
       +--opened without a text (public data), or approve = "off": it begins, and stays unknown

    any of them --decision "stop"--> stopped --later decision "approve"--> waiting or approved

    waiting    `RUN.waiting` has the text; calls are refused as PENDING
    approved   accepted.json has the hash of the text: the run begins, and every later open, too
    stopped    accepted.json has "stopped", though the decision may be deleted; work under way is
               undone, and each call is refused as STOPPED
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from fedloom.core.errors import ConfigError
from fedloom.remote import rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig, Role
from fedloom.remote.node.decision import AUDIT, RunDecision, What
from fedloom.remote.node.terms import sha256
from fedloom.remote.rpc_errors import CallRefused, refused
from fedloom.support.paths import write_atomically

FOLDER: Final = "approval"
ACCEPTED: Final = "accepted.json"
MOST_WAITING: Final = 100
"""Runs that may wait at a node."""
_STOPPED: Final = "stopped"
_log = logging.getLogger("fedloom.node")


class WaitingRun(BaseModel):
    """A run that a site has not decided about, or has.

    Attributes:
        run: its id.
        caller: its coordinator.
        since: when it was first opened here, in UTC.
        text: what the site approves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    caller: str
    since: str
    text: str


class Approvals:
    """The decisions about a node's runs, as its process sees them.

    Args:
        config: the node's.
        credentials: by which signatures are checked; None in the insecure mode.
        audit: the node's log.
    """

    def __init__(
        self, config: NodeConfig, credentials: Credentials | None, audit: AuditLog
    ) -> None:
        self._config, self._credentials, self._audit = config, credentials, audit
        self._folder = config.state / FOLDER
        path = self._folder / ACCEPTED
        self._accepted: dict[str, str] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        )
        self._wrong: set[str] = set()

    def check(self, run: str, caller: str, text: str) -> None:
        """Check that a run may begin here.

        Args:
            run: its id.
            caller: its coordinator.
            text: what the site approves; "" for a run that needs no approval.

        Raises:
            CallRefused: the site has stopped it, or has not approved it yet.
            OSError: the run cannot be recorded.
        """
        self.check_stop(run)
        if not text or self._config.approve == "off" or self._accepted.get(run) == sha256(text):
            return
        found = self._decision(run)
        if found is not None and found.what == "approve" and found.sha256 == sha256(text):
            self._accept(run, caller, text, found.by or "a user of this machine")
        elif self._config.approve == "auto" and sha256(text) in self._accepted.values():
            self._accept(run, caller, text, "auto: an equal run was approved")
        else:
            self._wait(run, caller, text)
            raise CallRefused(rpc_errors.PENDING, f"run {run[:8]} waits for approval at this site")

    def check_stop(self, run: str) -> None:
        """Raise CallRefused if the site has stopped a run."""
        if self.stopped(run):
            raise CallRefused(rpc_errors.STOPPED, f"this site has stopped run {run[:8]}")

    def stopped(self, run: str) -> str:
        """Who has stopped a run; "" for nobody. It stays stopped when the certificate of whoever
        stopped it ends.
        """
        found = self._decision(run)
        if found is not None and found.what == "approve":
            return ""
        if found is not None and self._accepted.get(run) != _STOPPED:
            self._keep(run, _STOPPED)
        return (found.by if found is not None else "") or "a user of this machine" * (
            self._accepted.get(run) == _STOPPED
        )

    def confirm(self) -> None:
        """Write what an auditor has confirmed of the audit log into it, once."""
        path = self._folder / f"{AUDIT}.decision"
        if path.exists():
            found = self._decision(AUDIT)
            if found is not None and found.what == "audit" and found.by:
                self._audit.write(
                    "confirmed", found.by, newest=found.sha256, decision=found.model_dump()
                )
            path.unlink()

    def _decision(self, run: str) -> RunDecision | None:
        """The newest decision about a run, if it counts."""
        path = self._folder / f"{run}.decision"
        try:
            found = RunDecision.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            why = f"it cannot be read ({type(error).__name__})"
        else:
            why = "it is about another run" if found.run != run else self._unproved(found)
            if not why:
                return found
        if run not in self._wrong:
            self._wrong.add(run)
            _log.error("%s does not count: %s", path, why)
        return None

    def _unproved(self, found: RunDecision) -> str:
        """Why a decision has not the role that it needs; "" if it has."""
        if not self._config.roles:
            return ""
        if found.what not in self._config.roles.get(found.by, ()):
            return f"roles of node.toml does not let {found.by!a} {found.what}"
        if self._credentials is None:
            return "signatures cannot be checked in the insecure mode"
        try:
            pem, signature = found.certificate.encode(), bytes.fromhex(found.signature)
        except ValueError:
            return "its signature is invalid"
        if not self._credentials.signed(found.by, pem, found.signed, signature):
            return f"it is not signed by {found.by}, or the certificate is not valid now"
        if found.what not in self._credentials.roles_in(pem):
            return f"the certificate of {found.by} has not the role {found.what}"
        return ""

    def _accept(self, run: str, caller: str, text: str, by: str) -> None:
        self._audit.write("approved", caller, run=run, by=by, summary=sha256(text))
        self._keep(run, sha256(text))
        self._note(run, caller, text)
        _log.info("run %s is approved by %s", run[:8], by)

    def _keep(self, run: str, what: str) -> None:
        self._accepted[run] = what
        write_atomically(self._folder / ACCEPTED, json.dumps(self._accepted, indent=1).encode())

    def _wait(self, run: str, caller: str, text: str) -> None:
        known = waiting(self._folder, run)
        if known is not None and (known.caller, known.text) == (caller, text):
            return
        if known is None and sum(1 for _ in self._folder.glob("*.waiting")) >= MOST_WAITING:
            raise refused(
                f"{MOST_WAITING} runs wait at this node: its owner must decide about them first"
            )
        self._audit.write("waits for approval", caller, run=run, summary=sha256(text))
        self._note(run, caller, text)
        _log.warning(
            "run %s of %s waits: fedloom node NODE.toml --approve %s", run[:8], caller, run[:8]
        )

    def _note(self, run: str, caller: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        known = waiting(self._folder, run)
        since = _now() if known is None else known.since
        entry = WaitingRun(run=run, caller=caller, since=since, text=text)
        write_atomically(self._folder / f"{run}.waiting", entry.model_dump_json(indent=1).encode())


def waiting(folder: Path, run: str) -> WaitingRun | None:
    """What a site was shown of a run; None for nothing."""
    try:
        return WaitingRun.model_validate_json((folder / f"{run}.waiting").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def runs(state: Path) -> list[tuple[WaitingRun, str]]:
    """The runs that a node's site was shown, the oldest first, each with what was decided: "waits",
    "approve", "stop".

    Args:
        state: the node's folder.
    """
    folder = state / FOLDER
    found = [
        one for path in folder.glob("*.waiting") if (one := waiting(folder, path.stem)) is not None
    ]
    accepted = (
        json.loads((folder / ACCEPTED).read_text(encoding="utf-8"))
        if (folder / ACCEPTED).exists()
        else {}
    )
    decided = {}
    for one in found:
        path = folder / f"{one.run}.decision"
        decision = (
            RunDecision.model_validate_json(path.read_bytes()).what if path.exists() else "waits"
        )
        decided[one.run] = "approve" if one.run in accepted and decision == "waits" else decision
    return [(one, decided[one.run]) for one in sorted(found, key=lambda one: one.since)]


def find(state: Path, beginning: str) -> WaitingRun:
    """The run whose id begins like this.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = [one for one, _ in runs(state) if one.run.startswith(beginning)]
    if len(found) != 1 or len(beginning) < 4:
        known = ", ".join(one.run[:8] for one, _ in runs(state)) or "none"
        raise ConfigError(
            f"no single run begins with {beginning!a}; runs here: {known} (fedloom node --runs)"
        )
    return found[0]


def decide(state: Path, shown: WaitingRun, what: What, signer: Credentials | None) -> RunDecision:
    """Record a decision about a run, which the node's process reads within a second.

    Args:
        state: the node's folder.
        shown: what was shown of the run.
        what: approve or stop.
        signer: whoever decides; None for a user of this machine.
    """
    return _record(
        state, RunDecision(run=shown.run, what=what, sha256=sha256(shown.text), time=_now()), signer
    )


def confirm(state: Path, newest: str, signer: Credentials) -> RunDecision:
    """Record that an auditor has seen the audit log up to the line of this hash."""
    return _record(state, RunDecision(run=AUDIT, what="audit", sha256=newest, time=_now()), signer)


def _record(state: Path, made: RunDecision, signer: Credentials | None) -> RunDecision:
    if signer is not None:
        made = made.model_copy(update={"by": signer.name, "certificate": signer.shown.decode()})
        made = made.model_copy(update={"signature": signer.sign(made.signed).hex()})
    (state / FOLDER).mkdir(mode=0o700, exist_ok=True)
    write_atomically(
        state / FOLDER / f"{made.run}.decision", made.model_dump_json(indent=1).encode()
    )
    return made


def holder(config: NodeConfig, folder: Path | None, role: Role) -> Credentials | None:
    """The credentials of whoever acts in a role; None where node.toml has no roles.

    Raises:
        ConfigError: the role needs a certificate that is not there, or has not the role.
    """
    if not config.roles:
        return None
    able = [name for name, theirs in config.roles.items() if role in theirs]
    if folder is None:
        raise ConfigError(
            "roles of node.toml: give --as with the folder of the certificate of "
            f"{' or '.join(able) or 'somebody'}, who may {role}"
        )
    found = Credentials(config.ca, folder / "certificate.pem", folder / "key.pem", config.revoked)
    if found.name not in able or role not in found.roles:
        raise ConfigError(
            f"{found.name} may not {role} here: node.toml gives that role to "
            f"{', '.join(able) or 'nobody'}, and the certificate has "
            f"{', '.join(found.roles) or 'none'}; request one with --role {role}"
        )
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
