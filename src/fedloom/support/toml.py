"""TOML of any origin: what cannot be read raises one kind of error."""

import tomllib
from typing import Any


def loads(text: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        tomllib.TOMLDecodeError: it is not valid, is nested too deeply, or has a number of too many
            digits.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except ValueError as error:  # such as an integer of more than 4,300 digits
        raise tomllib.TOMLDecodeError(str(error)) from None
