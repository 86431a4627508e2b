"""The folder of one trained model, which plain PyTorch opens: weights, architecture, preprocessing,
classes.

`model.safetensors` has the state dict, `network.py` the architecture as one class and the reading
of rows, `model.json` all else, and `predict.py` uses them. They need torch and safetensors (Pillow
for images), and nothing of fedloom. fedloom itself reads a folder as untrusted input: it builds its
own networks by name and runs no code of the folder, except a `network.py` that the caller trusts.
"""

import importlib.util
import inspect
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedloom import models
from fedloom.core.errors import CheckpointError, ConfigError, DataError, warn_once
from fedloom.core.problems import problems
from fedloom.data import standalone
from fedloom.data.columns import RawColumn, columns_of
from fedloom.data.encoder import LARGEST, ColumnEncoder, RawNumber, TableEncoder
from fedloom.data.grammar import BOOLEANS, MISSING_WORDS, NUMBER, Decimal, Grammar
from fedloom.data.images import MODES
from fedloom.deploy.folder import LARGEST_MANIFEST, NumberInfo, digest, readable, validating
from fedloom.deploy.rows import RawRows, encode_images, raw_column, read_rows
from fedloom.deploy.table_network import TableSettings, network_of, network_source, problem
from fedloom.support.paths import write_atomically

MODEL, WEIGHTS, NETWORK, PREDICT = "model.json", "model.safetensors", "network.py", "predict.py"
_HEX = Field(pattern="^[0-9a-f]{64}$")


class ModelInputs(BaseModel):
    """How raw rows become inputs of a network: (values - mean) / scale, with `fill` for missing
    numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["table", "image"]
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    columns: tuple[dict[str, Any], ...] = ()
    """The rule of each raw column of a table: see `TableEncoder.to_dict`."""
    missing_words: tuple[str, ...] = MISSING_WORDS
    """Of a table, words that stand for a missing value, as an empty cell does."""
    decimal: Decimal = "."
    """Of a table, the sign before the decimals of a number."""
    optional: tuple[str, ...] = ()
    """Columns of a table that an owner lacked in training: rows may lack them, too."""
    fill: tuple[float, ...] = ()
    mean: tuple[float, ...]
    scale: tuple[float, ...]


class ModelManifest(BaseModel):
    """The content of `model.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["fedloom-model/1"] = "fedloom-model/1"
    fedloom: str
    """The version that wrote it."""
    owner: str
    """A client, or "server" for the model that all clients share."""
    method: str
    eval_mode: str
    """The method's evaluation mode in which the model was used, such as after fine-tuning; "" for
    none.
    """
    round: int = Field(ge=0)
    classes: tuple[str, ...] = Field((), max_length=1 << 16)
    number: NumberInfo | None = None
    """In place of classes, for a number to predict."""
    model: str | None
    """The name of a network of fedloom that has these weights; None if only `network.py` defines
    it.
    """
    norm: Literal["group", "batch", "none"] | None
    table: TableSettings | None = None
    """Trees and linear models, which fedloom builds from these values and the tensors."""
    inputs: ModelInputs
    network_sha256: str = _HEX
    state_sha256: str = _HEX
    state_bytes: int = Field(ge=8, le=1 << 36)

    @model_validator(mode="after")
    def _check_label(self) -> "ModelManifest":
        if (len(self.classes) < 2) if self.number is None else bool(self.classes):
            raise ValueError("must have at least two classes, or a number and none")
        return self

    @property
    def outputs(self) -> int:
        """The width of the network's outputs."""
        return len(self.classes) if self.number is None else len(self.number.names)


def write_model(
    folder: Path, values: Mapping[str, Any], state: Mapping[str, Tensor], network: str = ""
) -> None:
    """Write a folder, the manifest last.

    Args:
        folder: created if missing.
        values: of a `ModelManifest`, except the files' digests and sizes.
        state: the state dict.
        network: the source of the class `Network`; that of `values["table"]` needs none.
    """
    weights = save_tensors(dict(state))
    inputs: ModelInputs = values["inputs"]
    source = network_file(network or network_source(), inputs).encode()
    manifest = ModelManifest(
        **values,
        network_sha256=digest(source),
        state_sha256=digest(weights),
        state_bytes=len(weights),
    )
    # an earlier version reads the folder of a network, which has no table
    content = manifest.model_dump(mode="json", exclude=None if manifest.table else {"table"})
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    usage = "ROWS.csv" if inputs.kind == "table" else "IMAGE.png"
    script = _PREDICT if manifest.number is None else _PREDICT_NUMBER
    for name, data in (
        (WEIGHTS, weights),
        (NETWORK, source),
        (PREDICT, script.replace("HEAD", _HEAD).replace("ROWS", usage).encode()),
        (MODEL, text.encode()),
    ):
        write_atomically(folder / name, data)


def load_model(folder: str | Path, *, trust: Collection[str] = ()) -> "DeployedModel":
    """A model from its folder, written by `export`.

    Args:
        folder: with `model.json`.
        trust: "network.py" to run the folder's own, which a network that is not fedloom's needs.

    Raises:
        CheckpointError: the folder is incomplete, altered, or invalid.
        ConfigError: it needs a `network.py` that is not in `trust`.

    Example:
        >>> load_model("models/server").predict(np.zeros((3, 1, 8, 8), np.uint8)).shape  # of digits
        (3, 10)
    """
    path = Path(folder)
    manifest = read_model(path)
    with readable(path / WEIGHTS):
        known = (path / WEIGHTS).stat().st_size == manifest.state_bytes
        data = (path / WEIGHTS).read_bytes() if known else b""
    if digest(data) != manifest.state_sha256:
        raise CheckpointError(
            f"{path / WEIGHTS} is not the file that {MODEL} describes; copy the folder again"
        )
    with validating(path):
        state = load_tensors(data)
        if not all(value.isfinite().all() for value in state.values()):
            raise CheckpointError("a weight is not finite")
        shape, count = manifest.inputs.shape, manifest.outputs
        if manifest.table is not None:
            network = network_of(manifest.table)
        elif manifest.model is not None:
            with torch.device("meta"):
                network = models.build(manifest.model, shape, count, manifest.norm)
    if manifest.table is None and manifest.model is None:
        network = _own_network(path, manifest, trust)
    with validating(path):
        network.load_state_dict(state, assign=True)
        if manifest.table is not None:
            if wrong := problem(manifest.table, state, math.prod(shape)):
                raise CheckpointError(wrong)
            with torch.inference_mode():
                if network(torch.zeros(1, *shape)).shape != (1, count):
                    raise CheckpointError(f"its models do not give {count} outputs")
        return DeployedModel(manifest, network.eval())


def read_model(folder: Path) -> ModelManifest:
    """The content of a folder's `model.json`.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    path = folder / MODEL
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MODEL}: name the folder of one model, such as models/server of an "
            "export"
        )
    with readable(path):
        if path.stat().st_size > LARGEST_MANIFEST:
            raise CheckpointError(
                f"{path} is larger than {LARGEST_MANIFEST:,} bytes; copy the folder again"
            )
        values = json.loads(path.read_bytes())
    try:
        manifest = ModelManifest(**values)
    except (ValidationError, TypeError) as error:
        lines = (
            problems(error, ModelManifest) if isinstance(error, ValidationError) else [str(error)]
        )
        raise CheckpointError(
            "\n".join([f"{path} is not valid:", *(line[:300] for line in lines)])
        ) from None
    if manifest.model is not None and ":" in manifest.model:
        raise CheckpointError(f"{path} names {manifest.model!r}, which is not a network of fedloom")
    return manifest


def _own_network(path: Path, manifest: ModelManifest, trust: Collection[str]) -> nn.Module:
    file = path / NETWORK
    if not {NETWORK, str(file)} & {*trust}:
        raise ConfigError(
            f"{path} has a network that is not one of fedloom's, in {NETWORK}, whose code would "
            f"be executed; if you trust it, add --trust {NETWORK}, or trust=[{NETWORK!r}]"
        )
    with readable(file):
        source = file.read_bytes()
    if digest(source) != manifest.network_sha256:
        raise CheckpointError(
            f"{file} is not the file that {MODEL} describes; copy the folder again"
        )
    return network_class(file)()


def network_class(file: Path) -> type[nn.Module]:
    """The class `Network` of a file, which is executed."""
    spec = importlib.util.spec_from_file_location(
        f"network_{digest(str(file).encode())[:16]}", file
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type[nn.Module] = module.Network
    return kind


class DeployedModel:
    """A trained model.

    Attributes:
        manifest: the content of its `model.json`.
        network: the module, in evaluation mode.
        classes: K names; () for a number.
        recipe: what `read_rows` needs to read a file of rows.
    """

    def __init__(self, manifest: ModelManifest, network: nn.Module) -> None:
        self.manifest, self.network, self.classes = manifest, network, manifest.classes
        inputs = manifest.inputs
        numbers = {"mean": inputs.mean, "scale": inputs.scale} | (
            {"fill": inputs.fill} if inputs.fill else {}
        )
        for name, values in numbers.items():
            if len(values) != inputs.shape[0]:
                raise CheckpointError(
                    f"{name} has {len(values)} numbers, but the network takes {inputs.shape[0]}"
                )
        if min(inputs.scale) <= 0:
            raise CheckpointError("scale must be above 0")
        self._rules = [_rule(column) for column in inputs.columns]
        names = [{"name": rule.name} for rule in self._rules]
        table = {
            "kind": "table",
            "columns": names,
            "missing_words": inputs.missing_words,
            "decimal": inputs.decimal,
            "optional": inputs.optional,
        }
        image = {"kind": "cells", "shape": list(inputs.shape), "grid": [1, 1], "cells": [0]}
        self.recipe: dict[str, Any] = table if inputs.kind == "table" else image
        if (
            inputs.kind == "table"
            and sum(len(rule.names) for rule in self._rules) != inputs.shape[0]
        ):
            raise CheckpointError(
                f"its columns do not give the {inputs.shape[0]} numbers that its network takes"
            )

    def predict(self, rows: RawRows) -> np.ndarray:
        """Probabilities (n, K) float32 of new rows: see `fedloom.deploy.rows.RawRows`. A number,
        and its s.d. if the network predicts one, are (n, 1) or (n, 2) float64 in the unit of the
        label.

        Raises:
            DataError: the rows do not fit.
        """
        x = torch.from_numpy(self.encode(rows))
        with torch.inference_mode():
            outputs = torch.cat([self.network(part) for part in torch.split(x, 256)])
        number = self.manifest.number
        if number is None:
            out: np.ndarray = torch.softmax(outputs, -1).float().numpy()
            return out
        return number.in_unit(outputs)

    def encode(self, rows: RawRows) -> np.ndarray:
        """(n, *shape) float32, the network's input."""
        inputs = self.manifest.inputs
        if inputs.kind == "table":
            x = self._table(rows)
        else:
            data: Any = (
                read_rows(Path(rows), self.recipe)[0] if isinstance(rows, str | Path) else rows
            )
            if isinstance(data, Mapping):
                raise DataError(
                    "This model takes images: a uint8 array (n, C, H, W) or files, not columns "
                    "of a table."
                )
            x = encode_images(
                self.recipe, inputs.shape, data if isinstance(data, np.ndarray) else list(data)
            )
        if not len(x):
            raise DataError("At least one row is needed, but there is none.")
        broadcast = (-1, *[1] * (len(inputs.shape) - 1))
        mean, scale = (
            np.array(v, dtype=x.dtype if inputs.kind == "table" else np.float32).reshape(broadcast)
            for v in (inputs.mean, inputs.scale)
        )
        if inputs.fill:
            x = np.where(np.isnan(x), np.array(inputs.fill), x)
        out: np.ndarray = ((x - mean) / scale).astype(np.float32)
        return out

    def _table(self, rows: RawRows) -> np.ndarray:
        rules = self._rules
        data: Any = read_rows(Path(rows), self.recipe)[0] if isinstance(rows, str | Path) else rows
        if not hasattr(data, "keys") and not hasattr(data, "columns"):
            raise DataError(
                "This model takes rows of a table: a CSV file, or column -> values, not "
                f"{type(data)}."
            )
        grammar = Grammar(self.manifest.inputs.missing_words, self.manifest.inputs.decimal)
        columns = columns_of(data, grammar)
        missing = [rule.name for rule in rules if rule.name not in columns]
        if needed := [name for name in missing if name not in self.manifest.inputs.optional]:
            raise DataError(
                f"The rows must have the columns of this model, but {needed[0]!r} is missing."
            )
        if missing and columns:
            some = next(iter(columns.values()))
            columns |= {name: RawColumn.of(name, [None] * len(some), grammar) for name in missing}
            warn_once(
                f"the rows have no column {', '.join(map(repr, missing))}: its values count as "
                "missing"
            )
        parts = [rule.encode(raw_column(rule, columns[rule.name], grammar)) for rule in rules]
        if len({len(part) for part in parts}) > 1:
            raise DataError("All columns must have the same number of rows.")
        return np.concatenate(parts, axis=1).astype(np.float64)


def _rule(column: dict[str, Any]) -> ColumnEncoder:
    if column.keys() <= {"name", "gaps", "indicator"}:
        return RawNumber(**column)
    return TableEncoder.from_dict({"columns": [column], "dropped": []}).columns[0]


# -- files of plain PyTorch ------------------------------------------------------------------------

_HEAD = '''"""Predict new rows: python predict.py ROWS. It needs torch and safetensors, and the files beside it."""
'''  # noqa: E501
_PREDICT = """HEADimport csv
import sys
import torch
from network import INFO, load, read_rows

if len(sys.argv) != 2:
    raise SystemExit("Name one file: python predict.py ROWS")
sys.stdout.reconfigure(errors="replace")  # signs that the output cannot hold
write = csv.writer(sys.stdout, lineterminator="\\n").writerow
with torch.inference_mode():
    probabilities = load()(read_rows(sys.argv[1])).softmax(-1)
write(["predicted", *INFO["classes"]])
for row in probabilities.tolist():
    write([INFO["classes"][row.index(max(row))], *(f"{p:.6f}" for p in row)])
"""
_PREDICT_NUMBER = """HEADimport csv
import math
import sys
import torch
from network import INFO, load, read_rows

if len(sys.argv) != 2:
    raise SystemExit("Name one file: python predict.py ROWS")
sys.stdout.reconfigure(errors="replace")  # signs that the output cannot hold
write = csv.writer(sys.stdout, lineterminator="\\n").writerow
number = INFO["number"]
with torch.inference_mode():
    outputs = load()(read_rows(sys.argv[1])).double()
write([number["label"] or "number", *["s.d."] * number["variance"]])
for mean, *spread in outputs.tolist():
    numbers = [mean * number["scale"] + number["shift"], *(math.exp(s / 2) * number["scale"] for s in spread)]
    write([f"{value:.9g}" for value in numbers])
"""  # noqa: E501
_NETWORK = '''"""A trained network and the preprocessing of its rows, in plain PyTorch; fedloom is not needed."""
{imports}
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import device, inf, nan, nn  # noqa: F401

FOLDER = Path(__file__).parent
INFO = json.loads((FOLDER / "model.json").read_text(encoding="utf-8"))


{network}

def load():
    """The trained network, in evaluation mode."""
    network = Network()
    network.load_state_dict(load_file(FOLDER / "model.safetensors"))
    return network.eval()


{rows}'''  # noqa: E501
_TABLE_ROWS = (
    '''def read_rows(path):
    """Inputs (n, F) of the rows of a CSV file, as in training. Columns are found by name."""
    inputs = INFO["inputs"]
    names, rows = read_table(path)
    needed = [column["name"] for column in inputs["columns"]]
    if lacking := [name for name in needed if name not in names and name not in inputs["optional"]]:
        raise SystemExit(f"The rows must have the columns of this model, but {lacking[0]!r} is missing.")
    if gone := [name for name in needed if name not in names]:
        listed = ", ".join(map(repr, gone))
        print(f"the rows have no column {listed}: its values count as missing", file=sys.stderr)
    words = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    columns = [encode(column, words.get(column["name"], [""] * len(rows))) for column in inputs["columns"]]
    x = torch.cat([torch.tensor(column, dtype=torch.float64) for column in columns], 1)
    mean, scale, fill = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("mean", "scale", "fill"))
    if len(fill):
        x = torch.where(x.isnan(), fill, x)
    return ((x - mean) / scale).float()


def read_table(path):
    """The names of a CSV file's columns, and the words of its rows, without the spaces around them."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read().lstrip("\\r\\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read as CSV in UTF-8 ({error}).")
    start = ""
    for line in text.splitlines(keepends=True):
        start += line
        if start.count('"') % 2 == 0:
            break
    outside = "".join(start.split('"')[::2])
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\\t|", key=outside.count))
    try:
        table = [row for row in lines if row]
    except csv.Error as error:
        raise SystemExit(f"{path}, line {lines.line_num}, cannot be read as CSV ({error}).")
    last = '"' + table[-1][-1].replace('"', '""') if table else " "
    if text.endswith(last) and not text.endswith(last + '"'):
        raise SystemExit(f"{path} ends within quotes; correct its last line.")
    table = [[word.strip() for word in row] for row in table]
    names, rows = table[0] if table else [], table[1:]
    if not rows:
        raise SystemExit(f"{path} must have a header, and rows below it.")
    if len({*names}) < len(names) or "" in names:
        raise SystemExit(f"{path}: column names must be unique and not empty; rename some of {names[:12]}.")
    if odd := next((k for k, row in enumerate(rows, 1) if len(row) != len(names)), 0):
        found = len(rows[odd - 1])
        raise SystemExit(f"{path}, row {odd}: expected {len(names)} values, as in the header, but found {found}.")
    return names, rows


def encode(column, words):
    """The numbers of each value: a number, a one-hot word, a hashed text, or the parts of a date."""
    inputs = INFO["inputs"]
    missing = [word in ("", *inputs["missing_words"]) for word in words]
    words = ["?" if gone else word for word, gone in zip(words, missing)]
    if "words" in column:
        words = [known_word(column["words"], word) for word in words]
        note_unknown(column, words)
        hot = [[float(known == word) for known in column["words"]] for word in words]
        return [row + [1.0 - sum(row)] * bool(column.get("other")) for row in hot]
    if "width" in column:
        width = column["width"]
        return [[0.0] * width if gone else hashed_text(word, width) for word, gone in zip(words, missing)]
    if "order" in column:
        dates = [date(column, word, gone) for word, gone in zip(words, missing)]
        return [numbers + [float(gone)] * column["indicator"] for numbers, gone in zip(dates, missing)]
    truth = BOOLEANS
    if all(gone or word in truth for word, gone in zip(words, missing)):
        words = [str(truth.get(word)) for word in words]
    elif inputs["decimal"] == ",":
        words = [word.replace(".", "_").replace(",", ".") for word in words]
    numbers = [float("nan") if gone else number(column["name"], word) for word, gone in zip(words, missing)]
    if not column.get("gaps") and any(missing):
        raise SystemExit(f"Column {column['name']!r} must hold a number in each row.")
    return [[n, float(gone)] if column.get("indicator") else [n] for n, gone in zip(numbers, missing)]


def note_unknown(column, words):
    """Say on standard error how many words training did not have."""
    unknown = [word for word in words if word not in column["words"]]
    other = column.get("other")
    if unknown and (not other or len(unknown) == len(words)):
        print(
            f"column {column['name']!r}: {len(unknown)} of {len(words)} rows hold words that training did not have, "
            f"such as {unknown[0][:40]!r}; they count as {'rare ones' if other else 'none of its words'}",
            file=sys.stderr,
        )


def number(name, word):
    if not re.fullmatch(r"NUMBER", word) or not abs(float(word)) < LARGEST:
        raise SystemExit(f"Column {name!r} must hold a finite number in each row, but has {word!r}.")
    return float(word)


def date(column, word, gone):
    if gone and column["gaps"]:
        return [float("nan")] * len(DATE_PARTS)
    try:
        at = None if gone else moment_of(word, column["order"])
    except ValueError:
        at = None
    if at is None:
        raise SystemExit(f"Column {column['name']!r} must hold a date in each row, but has {word!r}.")
    return date_numbers(at)
'''.replace("BOOLEANS", repr(BOOLEANS))  # noqa: E501
    .replace("NUMBER", NUMBER)
    .replace("LARGEST", repr(LARGEST))
)
_IMAGE_ROWS = '''def read_rows(path):
    """The input (1, C, H, W) of an image file, turned upright."""
    inputs = INFO["inputs"]
    channels, height, width = inputs["shape"]
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as an image ({error}).")
    if image.size != (width, height):
        raise SystemExit(f"{path} must have {width}x{height} pixels, not {image.size[0]}x{image.size[1]}.")
    if image.mode not in MODES:
        raise SystemExit(f"{path} must have 8 bits per channel, but its mode is {image.mode}.")
    image = image.convert("L" if channels == 1 else "RGB")
    x = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, height, width, channels)
    mean, scale = (torch.tensor(inputs[name]).view(-1, 1, 1) for name in ("mean", "scale"))
    return (x.permute(0, 3, 1, 2) - mean) / scale
'''.replace("MODES", repr(MODES))  # noqa: E501


def network_file(network: str, inputs: ModelInputs) -> str:
    """The content of `network.py`, given the source of its class."""
    table = inputs.kind == "table"
    fixed = any({"width", "order"} & column.keys() for column in inputs.columns)
    imports = (
        "import csv\nimport io\nimport json\nimport re\nimport sys" if table else "import json"
    )
    if fixed:
        imports = imports.replace("json\n", "json\nimport math\n") + "\nimport unicodedata"
        imports += "\nfrom datetime import UTC, datetime, timedelta"
    text = _NETWORK.format(
        imports=imports, network=network, rows=_TABLE_ROWS if table else _IMAGE_ROWS
    )
    if fixed:
        page = inspect.getsource(standalone)
        text += f"\n\n{page[page.index('DATE_PARTS =') :]}"
    elif table:
        text += f"\n\n{inspect.getsource(standalone.known_word)}"
    return (
        text
        if table
        else text.replace("import torch\n", "import torch\nfrom PIL import Image, ImageOps\n", 1)
    )
