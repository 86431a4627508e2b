"""A mean of trees and linear models over the columns of a table, in plain PyTorch.

Its source is written into folders, and fedloom builds it from a folder's `model.json` and tensors,
which are data: it runs nothing of the folder.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedloom.methods.tables import own_models
from fedloom.trees.model import Trees

LEAST = 1e-300
"""The least probability."""
NODES = ("root", "feature", "left", "child", "value")
"""The tensors of trees over bins."""


class Part(BaseModel):
    """One model: see `TableNetwork`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern="^[a-z]+[0-9]*$")
    kind: Literal["bins", "thresholds", "linear"]
    weight: float = Field(ge=0, le=1)
    link: Literal["none", "softmax", "exp"]
    floor: float = Field(0.0, ge=0, lt=1)
    standard: tuple[float, float] = (0.0, 1.0)
    scales: Literal["", "joint", "own"] = ""
    clip: float = Field(0.0, ge=0)
    outputs: int = Field(1, ge=1, le=1 << 16)
    divisor: int = Field(0, ge=0)
    owner: int = Field(-1, ge=-1)


class TableSettings(BaseModel):
    """The settings of a `TableNetwork`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: dict[
        str,
        tuple[
            Literal["bool", "uint8", "int16", "int32", "int64", "float32", "float64"],
            tuple[int, ...],
        ],
    ]
    columns: tuple[tuple[int, int, bool, int], ...]
    number: bool
    parts: tuple[Part, ...] = Field(min_length=1, max_length=1 << 12)


class TableNetwork(nn.Module):
    """Logits (n, K), or a standardized number (n, 1), of rows x (n, F): the weighted mean of the
    predictions of `parts`.

    `settings` are plain values: `tensors`, the dtype and shape of each by name; `columns`, of each
    raw column its inputs, how many of them are used, whether they are words, and the place of a
    missing word; `number`, whether there are no classes; and the `parts`. A part has a `name`, with
    which its tensors begin, a `weight`, and a `kind`:

        bins        trees over bins; the leaves' sums of each of `outputs`, or with a `floor` their
                    shares; of a number divided by `divisor`; `owner` is the last column, if not -1
        thresholds  trees over numbers, each with a share in the sum of leaves
        linear      a weight and a bias

    The last two read columns filled and scaled by the tensors of `scales`, and clipped to `clip`;
    "" reads the inputs as they are. `link` makes predictions of sums: softmax, exp, or none. A
    number becomes (number - shift) / scale of `standard`.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        for name, (dtype, shape) in settings["tensors"].items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K), or a standardized number (n, 1)."""
        x = x.flatten(1)
        raw, total = self.raw(x), torch.zeros(len(x), 1, dtype=torch.float64)
        for part in self.settings["parts"]:
            found = self.of_bins(part, raw) if part["kind"] == "bins" else self.sums(part, x, raw)
            if part["link"] == "softmax":
                found = found.softmax(1)
            elif part["link"] == "exp":
                found = found.exp()
            if self.settings["number"]:
                found = (found - part["standard"][0]) / part["standard"][1]
            else:
                found = part["floor"] + (1 - found.shape[1] * part["floor"]) * found
            total = total + part["weight"] * found
        return (total if self.settings["number"] else total.clamp(min=LEAST).log()).float()

    def tensor(self, part: Any, name: str) -> Tensor:
        """A tensor of a part."""
        return self.get_buffer(f"{part['name']}_{name}")

    def raw(self, x: Tensor) -> Tensor:
        """One column for each raw one (n, G): numbers, and the places of words; NaN for a missing
        value.
        """
        columns, at = [], 0
        for width, used, words, missing in self.settings["columns"]:
            part, at = x[:, at : at + width], at + width
            if words:
                place = part.argmax(1).float()
                gap = (part.sum(1) == 0) | (place == missing)
                part = torch.where(gap, torch.tensor(float("nan")), place)[:, None]
            columns.append(part[:, :used])
        return torch.cat(columns, 1)

    def plain(self, raw: Tensor) -> Tensor:
        """For each raw column (n, G) its number, or an indicator of each word, and then one of
        missing values.
        """
        columns = []
        sizes = [
            width if words else 0
            for width, used, words, _ in self.settings["columns"]
            for _ in range(used)
        ]
        for size, value in zip(sizes, raw.double().split(1, 1)):  # noqa: B905
            gap = value.isnan()
            hot = (value == torch.arange(size)).double()
            columns += [torch.where(gap, torch.tensor(float("nan")), hot) if size else value]
            columns += [gap.double()]
        return torch.cat(columns, 1)

    def sums(self, part: Any, x: Tensor, raw: Tensor) -> Tensor:
        """The sums (n, K) of a linear model, or of trees over numbers."""
        if part["scales"]:
            fill, mean, scale = (
                self.get_buffer(f"{part['scales']}_{name}") for name in ("fill", "mean", "scale")
            )
            x = self.plain(raw)
            x = (torch.where(x.isnan(), fill, x) - mean) / scale
        if part["clip"]:
            x = x.clamp(-part["clip"], part["clip"]).float()
        if part["kind"] == "linear":
            return x.double() @ self.tensor(part, "weight").T + self.tensor(part, "bias")
        root, share, feature, left, right, threshold, value = (
            self.tensor(part, name)
            for name in ("root", "share", "feature", "left", "right", "threshold", "value")
        )
        total = torch.zeros(len(x), value.shape[1], dtype=torch.float64)
        for first, its_share in zip(root.tolist(), share.tolist()):  # noqa: B905
            node = torch.full((len(x),), first)
            while bool((feature[node] >= 0).any()):
                column = feature[node].long()
                at = x.gather(1, column.clamp(min=0)[:, None])[:, 0]
                below = torch.where(at <= threshold[node], left[node], right[node])
                node = torch.where(column >= 0, below.long(), node)
            total += its_share * value[node]
        return total

    def of_bins(self, part: Any, raw: Tensor) -> Tensor:
        """Sums (n, K), shares (n, K) or numbers (n, 1) of trees over the bins of raw columns."""
        if part["owner"] >= 0:
            raw = torch.cat([raw, torch.full((len(raw), 1), float(part["owner"]))], 1)
        signed = (raw + 0.0).view(torch.int32).long() & 0xFFFFFFFF
        keys = torch.where(signed >= 2**31, 2**32 - 1 - signed, signed + 2**31)
        bins = torch.zeros(raw.shape, dtype=torch.long)
        category = self.get_buffer("bins_category").tolist()
        every = torch.split(self.get_buffer("bins_edges"), self.get_buffer("bins_lengths").tolist())
        for f, edges in enumerate(every):
            place = torch.searchsorted(edges, keys[:, f].contiguous(), right=True)
            if category[f]:
                same = raw[:, f, None] == edges
                place = torch.full_like(place, len(edges))
                if len(edges):
                    place = torch.where(same.any(1), same.int().argmax(1), place)
            bins[:, f] = torch.where(raw[:, f].isnan(), 0, place + 1)
        root, feature, left, child, value = (
            self.tensor(part, name) for name in ("root", "feature", "left", "child", "value")
        )
        outputs = part["outputs"]
        total = torch.zeros(len(bins), outputs, dtype=torch.long)
        for t, first in enumerate(root.tolist()):
            node = torch.full((len(bins),), first)
            while bool((feature[node] >= 0).any()):
                column = feature[node].long()
                place = bins.gather(1, column.clamp(min=0)[:, None])[:, 0]
                goes = (left[node, place // 8] >> (7 - place % 8)) & 1
                node = torch.where(column >= 0, child[node].long() + 1 - goes, node)
            if value.shape[1] == 1:
                total[:, t % outputs] += value[node, 0]
            else:
                total += value[node]
        if part["divisor"]:
            return total.double() * 2.0**-20 / part["divisor"]
        if part["link"] == "none":
            return total / total.double().sum(1, keepdim=True)
        s = total.double() * 2.0**-20
        return torch.cat([torch.zeros_like(s), s], 1) if outputs == 1 else s


def network_of(settings: TableSettings) -> nn.Module:
    """The network, without its tensors."""
    with torch.device("meta"):
        return TableNetwork(settings.model_dump())


def source_of() -> str:
    """The source of `Network` in a folder, which finds its settings in `model.json`."""
    return f"""LEAST = {LEAST!r}


{inspect.getsource(TableNetwork).replace("Any", "object").replace("Tensor", "torch.Tensor")}

class Network(TableNetwork):
    def __init__(self):
        super().__init__(INFO["table"])
"""


def problem(settings: TableSettings, state: Mapping[str, Tensor], shape: tuple[int, ...]) -> str:
    """What is wrong with settings and tensors of unknown origin for rows of this shape; "" if no
    row can end in an endless walk through a tree.
    """
    if sum(width for width, *_ in settings.columns) != math.prod(shape):
        return f"its columns do not give the {math.prod(shape)} numbers of a row"
    p = sum((width if words else used) + used for width, used, words, _ in settings.columns)
    for part in settings.parts:
        own = {
            name.removeprefix(f"{part.name}_"): value
            for name, value in state.items()
            if name.startswith(f"{part.name}_")
        }
        found = ""
        if part.kind == "bins":
            lengths = state["bins_lengths"]
            found = Trees(*(own[name].numpy() for name in NODES)).problem(
                len(lengths), int(lengths.max()) + 2
            )
        elif part.kind == "thresholds":
            found = own_models.problem("forest", own, p if part.scales else math.prod(shape))
        if found:
            return f"{part.name}: {found}"
    return ""
