"""The audit log of a node: every answer with its caller, its size and its hash, never its content.

Answered calls are never dropped. Refusals have a file of their own, as anybody with a certificate
can cause them.

The line is written before the answer is sent. If writing fails, the call fails, and the caller may
repeat it.

The lines form a chain: each holds the SHA-256 of the line before it, also across files. `verify`
finds a line that was changed, removed or inserted. Anybody who can write to the folder can rewrite
the whole chain or cut its end. To detect this, the owner notes the newest hash elsewhere from time
to time, and compares.
"""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedloom.core.errors import CheckpointError

LARGEST = 64 << 20
"""Bytes after which a new file begins."""

FIRST: Final = "0" * 64
"""In place of a hash, before the first line of a chain."""
_NAME: Final = "%Y%m%dT%H%M%S.%fZ"


class AuditLog:
    """Append-only files with one JSON object per line, readable by their owner only.

    Attributes:
        path: answered calls. A full file is kept as `audit-….jsonl` with the time (UTC) in its
            name.
        refusals: refused calls. The last full file is kept as `refused.1.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusals = path.with_name("refused.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        # size of each file, and the hash of its last line
        self._ends: dict[Path, tuple[int, str]] = {}

    def write(self, what: str, caller: str, **facts: Any) -> None:
        """Add a line.

        Args:
            what: opened, answered, handed over, …
            caller: the name in the certificate.
            facts: run, call, method, bytes, hashes.

        Raises:
            OSError: writing failed; the call must not be answered.
        """
        self._append(self.path, what, caller, facts)

    def refuse(self, caller: str, **facts: Any) -> None:
        """Add a line about a refused call. Raises OSError."""
        self._append(self.refusals, "refused", caller, facts)

    def _append(self, path: Path, what: str, caller: str, facts: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        with self._lock:
            before, torn = self._end(path)
            entry = {
                "time": now.isoformat(timespec="milliseconds"),
                "what": what,
                "caller": caller,
                **facts,
            }
            line = json.dumps({**entry, "before": before}).encode()
            if path.exists() and path.stat().st_size > LARGEST:
                os.replace(
                    path, self._full(now) if path == self.path else path.with_suffix(".1.jsonl")
                )
                torn = False
            size = self._write(path, b"\n" * torn + line + b"\n")
            self._ends[path] = size, hashlib.sha256(line).hexdigest()

    def _end(self, path: Path) -> tuple[str, bool]:
        """The hash of the last line, and whether the process was killed while it wrote
        that line.
        """
        size = path.stat().st_size if path.exists() else 0
        known = self._ends.get(path)
        if known is not None and known[0] == size:
            return known[1], False
        if size:
            data = path.read_bytes()
            return hashlib.sha256(data.removesuffix(b"\n").rpartition(b"\n")[2]).hexdigest(), data[
                -1:
            ] != b"\n"
        full = sorted(path.parent.glob(f"{path.stem}-*Z.jsonl")) if path == self.path else []
        return (
            hashlib.sha256(full[-1].read_bytes().splitlines()[-1]).hexdigest() if full else FIRST
        ), False

    @staticmethod
    def _write(path: Path, line: bytes) -> int:
        """Append a whole line, or nothing, and sync it. Returns the new size."""
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            try:
                if os.write(file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
        return size + len(line)

    def _full(self, now: datetime) -> Path:
        """An unused name for a full file, even after the clock was set back."""
        names = (
            self.path.with_stem(f"{self.path.stem}-{now + timedelta(microseconds=n):{_NAME}}")
            for n in count()
        )
        return next(name for name in names if not name.exists())


class Verified(NamedTuple):
    """The result of `verify`.

    Attributes:
        lines: of the chain.
        unchained: lines of versions before 0.2, which no hash protects.
        torn: lines whose writing a crash interrupted; their calls were not answered.
        newest: hash of the last line. Note it elsewhere: a later log must still contain it.
        refusals: lines of the chain of refused calls, of which older ones are dropped.
        newest_refusal: hash of the last of them, to be noted as well.
        confirmed: who has confirmed the log, when, and the fingerprint of their key, the newest
            last. Whose key it is must be checked apart.
    """

    lines: int
    unchained: int
    torn: int
    newest: str
    refusals: int = 0
    confirmed: tuple[tuple[str, str, str], ...] = ()
    newest_refusal: str = FIRST


def verify(folder: Path, noted: str | Sequence[str] = ()) -> Verified:
    """Check the chains of a node's answered and of its refused calls, each over all its files.

    Args:
        folder: the node's `state`.
        noted: hashes that were noted earlier; the chains must contain them.

    Raises:
        CheckpointError: there is no log, a line was changed, removed or inserted, or no chain has
            such a hash.
    """
    paths = [
        path
        for path in (*sorted(folder.glob("audit-*Z.jsonl")), folder / "audit.jsonl")
        if path.exists()
    ]
    refusals = [
        path for path in (folder / "refused.1.jsonl", folder / "refused.jsonl") if path.exists()
    ]
    if not (paths or refusals):
        raise CheckpointError(
            f"{folder} has no audit.jsonl: give the folder that node.toml names as state"
        )
    found, hashes = _chain(_ordered(paths), FIRST)
    others = Verified(0, 0, 0, FIRST)
    if refusals:
        begun = FIRST
        if len(refusals) > 1:  # lines before the first were dropped
            with refusals[0].open("rb") as file:
                begun = (_parsed(file.readline()) or {}).get("before", FIRST)
        others, more = _chain(_ordered(refusals, begun), begun)
        hashes |= more
    for one in [noted] if isinstance(noted, str) else noted:
        if one and one not in hashes:
            raise CheckpointError(
                f"no line has the hash {one}: lines at the end were removed, or the log was "
                "replaced"
            )
    return found._replace(
        refusals=others.lines, torn=found.torn + others.torn, newest_refusal=others.newest
    )


def _chain(log: Iterable[tuple[Path, int, bytes]], begun: str) -> tuple[Verified, set[str]]:
    """What the lines of a chain are, and their hashes; `begun` is in place of the hash before the
    first line.

    Raises:
        CheckpointError: a line does not follow the one before it.
    """
    lines = unchained = torn = 0
    confirmed: list[tuple[str, str, str]] = []
    newest, hashes = begun, {begun}
    for path, number, line in log:
        entry = _parsed(line)
        if entry is not None and entry.get("what") == "confirmed":
            key = _signed_by(entry) if entry.get("newest") in hashes else ""
            if not key:
                raise CheckpointError(
                    f"{path}, line {number}: {entry.get('caller')!a} has not confirmed the lines "
                    "before it: they were replaced. Compare the files with a backup"
                )
            confirmed.append((str(entry["caller"]), str(entry["time"]), key))
        if entry is None:
            torn += 1
        elif "before" not in entry and not lines:
            unchained += 1
        elif entry.get("before") != newest:
            raise CheckpointError(
                f"{path}, line {number}: it does not follow the line before it: a line here was "
                "changed, removed or inserted. Compare the files with a backup"
            )
        else:
            lines += 1
        newest = hashlib.sha256(line).hexdigest()
        hashes.add(newest)
    return Verified(lines, unchained, torn, newest, 0, tuple(confirmed)), hashes


def _signed_by(entry: Mapping[str, Any]) -> str:
    """The fingerprint of the key that signed an auditor's line; "" if the signature is not that of
    the line.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    from fedloom.remote.certs import fingerprint
    from fedloom.remote.credentials import check_signature
    from fedloom.remote.node.decision import RunDecision

    try:
        found = RunDecision.model_validate(entry.get("decision"))
        certificate = x509.load_pem_x509_certificate(found.certificate.encode())
        check_signature(certificate, found.signed, bytes.fromhex(found.signature))
        right = (found.what, found.by, found.sha256) == ("audit", entry["caller"], entry["newest"])
        return fingerprint(certificate.public_key()) if right else ""  # type: ignore[arg-type]
    except (ValueError, KeyError, InvalidSignature):
        return ""


def _ordered(paths: Iterable[Path], newest: str = FIRST) -> Iterator[tuple[Path, int, bytes]]:
    """All lines with file and number. Files follow each other by their hashes, as a clock may have
    been set back.
    """
    first = {}
    for path in paths:
        with path.open("rb") as file:
            first[path] = (_parsed(file.readline()) or {}).get("before")
    while first:
        path = next((path for path, before in first.items() if before == newest), next(iter(first)))
        del first[path]
        for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
            yield path, number, line
        newest = hashlib.sha256(line).hexdigest()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for a line that was not written to its end."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
