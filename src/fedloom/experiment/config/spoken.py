"""Sentences for the command line, in the words of Python."""

import re

from fedloom.experiment.config.data import DataConfig

OPTIONS = {"--resume": "resume=True", "--out": "out", "--tune": "tune=True", "--seeds": "seeds"}
"""An option of the command line -> the argument of `run` or `compare`."""
_ENTRIES = re.compile(r"write in a file: \[compare\] methods = (\[.*\])")
_KEY = re.compile(r"(\w+) = ")
_PLACES = re.compile(
    r"(?<=Write )([a-z_]+(?:\.[a-z_]+)*(?: or [a-z_]+(?:\.[a-z_]+)*)*)(?=\.(?:$|\n))", re.M
)
_SETTING = re.compile(r"-s '?([a-z_]+(?:\.[a-z_]+)+)=((?:\[[^\]]*\]|[\w./-])+)'?")


def in_python(text: str) -> str:
    """The text with `Write data.clients` and options such as `--resume` as arguments: `Write
    clients=…`.
    """
    text = _PLACES.sub(
        lambda found: " or ".join(argument(path, "…") for path in found[0].split(" or ")), text
    )
    text = _SETTING.sub(lambda found: argument(found[1], _literal(found[2])), text)
    for option, name in OPTIONS.items():
        text = re.sub(rf"{option}(?![\w-])", name, text)
    text = _ENTRIES.sub(lambda found: "give methods=" + _entries(found[1]), text)
    text = text.replace("must be a table", "must be a mapping, such as {'name': value}")
    return re.sub(r"fedloom run (\w+) (\w+=\S+)", r"fedloom.run('\1', \2)", text)


def argument(path: str, value: str) -> str:
    """The keyword argument of a setting: `params={"lr": …}` of `params.lr`, and `clients=…` of
    `data.clients`.
    """
    first, *rest = path.split(".")
    if path in ("data.name", "models.pool"):
        return f"{first}={value}"
    if first == "data" and rest and rest[0] in {*DataConfig.model_fields}:
        first, *rest = rest
    inner = "".join(f'{{"{key}": ' for key in rest) + value + "}" * len(rest)
    return f"{first}={inner}"


def _entries(text: str) -> str:
    """Tables of `[compare]` as Python writes them."""
    text = re.sub(r"(?<= = )(true|false)\b", lambda found: found[0].capitalize(), text)
    return _KEY.sub(r'"\1": ', text)


def _literal(text: str) -> str:
    """A value of an override as Python writes it."""
    plain = re.fullmatch(r"-?\d+(\.\d+)?|\[.*\]|true|false", text)
    return {"true": "True", "false": "False"}.get(text, text) if plain else repr(text)
