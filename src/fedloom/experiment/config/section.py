"""What all sections of a config have in common."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedloom.core.errors import ConfigError
from fedloom.core.problems import problems


class Section(BaseModel):
    """Base of the sections of a config: frozen, and unknown settings are refused. A docstring under
    a setting describes it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values; what the original has cached is not copied."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


def validated(model: type[Any], values: Mapping[str, Any], at: str = "") -> Any:
    """`model(**values)`. Raises one ConfigError with all errors, each on a setting below `at`."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(problems(error, model, at))) from None
