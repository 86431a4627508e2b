"""Trained models to and from the Hugging Face hub, by its own library (extra `hub`)."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.deploy.models import (
    MODEL,
    NETWORK,
    PREDICT,
    WEIGHTS,
    DeployedModel,
    load_model,
    read_model,
)

FILES = (MODEL, WEIGHTS, NETWORK, PREDICT)
"""All that is uploaded or downloaded: an export's folder has no rows, and nothing else beside it
leaves.
"""


def push(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload the folder of one model, as `export` wrote it; returns the address of the commit.

    Trained weights may reveal rows that they were trained on: see docs/threat-model.md.

    Args:
        folder: with `model.json`, such as "models/server".
        repository: "owner/name" on the hub, which is created if it is missing.
        private: whether a repository that is created is private.

    Raises:
        CheckpointError: the folder is incomplete or invalid, or the hub refuses.
        ConfigError: the extra `hub` is missing.

    Example:
        >>> push("models/server", "owner/digits")
        'https://huggingface.co/owner/digits/commit/1a2b'
    """
    path = Path(folder)
    manifest = read_model(path)
    library = _library()
    api = library.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                folder_path=path,
                repo_id=repository,
                allow_patterns=[*FILES],
                commit_message=f"{manifest.method}, by fedloom {manifest.fedloom}",
            )
        )
    # the library's errors of names, access and network have no common base
    except Exception as error:
        raise CheckpointError(
            f"the hub did not take {path} as {repository}: {_first_line(error)}"
        ) from None


def pull(
    repository: str, *, revision: str | None = None, trust: Collection[str] = ()
) -> DeployedModel:
    """A model that `push` uploaded; it is checked like any folder from elsewhere.

    Args:
        repository: "owner/name" on the hub.
        revision: a commit, tag or branch; None for the newest. Name a commit to get the same model
            again.
        trust: see `load_model`.

    Raises:
        CheckpointError: the hub does not have it, or it is invalid.
        ConfigError: the extra `hub` is missing, or the model needs a `network.py` that is not in
            `trust`.

    Example:
        >>> pull("owner/digits").predict(np.zeros((3, 1, 8, 8), np.uint8)).shape
        (3, 10)
    """
    library = _library()
    try:
        folder = library.snapshot_download(repository, revision=revision, allow_patterns=[*FILES])
    except Exception as error:
        raise CheckpointError(f"the hub did not give {repository}: {_first_line(error)}") from None
    return load_model(folder, trust=trust)


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError('models of the hub need its library: pip install -e ".[hub]"') from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
