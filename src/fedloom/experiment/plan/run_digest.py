"""Identifies runs by everything that affects their results, to recognize finished ones."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from fedloom.core.errors import ConfigError, FedloomError
from fedloom.data.cache import files_key
from fedloom.data.sources import SOURCES
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.config.section import validated
from fedloom.experiment.plan.node_party import config_sha256
from fedloom.models import external
from fedloom.support import toml

BATCHING = ("auto", "batched")
"""Engines that sum in another order."""


def digest(run: RunConfig) -> str:
    """16 hex digits that identify everything that affects a run's results, including the user's own
    files and modules. Its name and number of workers do not count.

    Raises:
        ConfigError: see `RunConfig.resolve`.
    """
    method, cfg, _ = run.resolve()
    # the file is in config_sha256, but may define several methods
    page = [method.name] if run.method_is_file else []
    values = [run.engine.name in BATCHING, run.engine.device, *user_files(run), *page]
    return hashlib.sha256(f"{config_sha256(run, cfg)}\n{json.dumps(values)}".encode()).hexdigest()[
        :16
    ]


def is_finished(run: RunConfig, folder: Path) -> bool:
    """Whether the folder has the results of this run.

    Raises:
        ConfigError: it has another run.
    """
    try:
        values = toml.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {folder / 'config.toml'} ({type(error).__name__}): remove {folder}"
        ) from None
    try:
        same = digest(validated(RunConfig, values)) == digest(run)
    except FedloomError:  # perhaps of another version
        same = False
    if not same:
        raise ConfigError(
            f"{folder} has a run with other settings, or of another version of fedloom: "
            "remove the folder, or choose another"
        )
    return (folder / "result.json").is_file()


def user_files(run: RunConfig) -> Iterator[str]:
    """Digests of the user's files, data and modules that a run names; of a folder, by its files'
    sizes and times.
    """
    named = (
        run.pretrained.file,
        run.topology.file,
        run.columns.manifest,
        run.columns.presence,
        *(run.columns.files or ()),
    )
    yield from (_content(Path(path)) for path in named if path and Path(path).is_file())
    if run.data.name not in SOURCES and not run.data.own:
        path = Path(run.data.name).expanduser()
        if path.is_file():
            yield _content(path)
        elif path.is_dir():
            yield files_key(path)
    for name in (*run.models.names, run.data.partition, run.pretrained.model or ""):
        if source := _source(name):
            yield _content(source)


def _source(name: str) -> Path | None:
    """The file of `package.module:name`; None for fedloom's own and for other names."""
    module, colon, _ = name.partition(":")
    if not colon or module.partition(".")[0] == "fedloom" or external.is_external(name):
        return None
    try:
        spec = find_spec(module)
    except Exception:  # raised by the package on import; the run reports it
        return None
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return source if source is not None and source.is_file() else None


def _content(path: Path) -> str:
    stat = path.stat()
    return _sha256(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _sha256(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
