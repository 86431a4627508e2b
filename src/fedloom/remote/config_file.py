"""One reader for the TOML files of a federation: `node.toml` and `federation.toml`."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo

from fedloom.core.errors import ConfigError
from fedloom.core.problems import problems
from fedloom.support import toml


def _beside(path: Any, info: ValidationInfo) -> Any:
    folder = (info.context or {}).get("folder")
    return path if folder is None else type(path)(folder / path)


RelativePath = Annotated[Path, AfterValidator(_beside)]
"""A path relative to the folder of its file."""
RelativeName = Annotated[str, AfterValidator(_beside)]
"""The same as text."""


class FileSection(BaseModel):
    """A table of such a file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


ConfigT = TypeVar("ConfigT", bound=FileSection)


def read_config(path: Path, kind: type[ConfigT], hint: str) -> ConfigT:
    """The config in a file; paths in it are relative to its folder.

    Args:
        path: the TOML file.
        kind: the config that it must hold.
        hint: what to do if the file cannot be read.

    Raises:
        ConfigError: all errors in the file, one per line.
    """
    try:
        values = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return kind.model_validate(values, context={"folder": path.parent.absolute()})
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in problems(error, kind))) from None
