"""A mean of trees and linear models over the columns of a table, in plain PyTorch.

Its source is written into folders, and fedloom builds it from a folder's `model.json` and tensors,
which are data: it runs nothing of the folder.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedloom.methods.tables import own_models

STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Part(BaseModel):
    """One model: see `TableNetwork`."""

    model_config = STRICT

    name: str = Field(pattern="^[a-z]+[0-9]*$")
    kind: Literal["bins", "thresholds", "linear"]
    weight: float = Field(ge=0, le=1)
    link: Literal["none", "softmax", "exp", "shares"]
    floor: float = Field(0.0, ge=0, lt=1)
    standard: tuple[float, float] = (0.0, 1.0)
    scales: Literal["", "joint", "own"] = ""
    clip: float = Field(0.0, ge=0)
    owner: int = Field(-1, ge=-1)


class TableSettings(BaseModel):
    """The settings of a `TableNetwork`."""

    model_config = STRICT

    tensors: dict[
        str,
        tuple[Literal["bool", "uint8", "int32", "int64", "float32", "float64"], tuple[int, ...]],
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

        bins        trees that send sets of bins to the left; `owner` is the last column, if not -1
        thresholds  trees that send numbers to the left
        linear      a weight and a bias

    Each tree has a share in the sum of leaves. The last two read columns filled and scaled by the
    tensors of `scales`, and clipped to `clip`; "" reads the inputs as they are. `link` makes
    predictions of sums. No probability of a part is below its `floor`; a number becomes
    (number - shift) / scale of `standard`.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        for name, (dtype, shape) in settings["tensors"].items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K), or a standardized number (n, 1)."""
        x = x.flatten(1)
        # in double, as the run sums; the parts have weights that sum to 1
        raw, total = self.raw(x), torch.zeros(len(x), 1).double()
        for part in self.settings["parts"]:
            found, link = self.sums(part, x, raw), part["link"]
            if link == "softmax":
                found = found.softmax(1)
            elif link == "exp":
                found = found.exp()  # a count, of its logarithm
            elif link == "shares":  # equal ones where no tree has seen a row
                all_rows = found.sum(1, keepdim=True)
                found = torch.where(all_rows > 0, found / all_rows, 1 / found.shape[1])
            # mixed with equal shares, so that none is 0; the floor of numbers is 0
            found = part["floor"] + (1 - found.shape[1] * part["floor"]) * found
            shift, scale = part["standard"]
            total = total + part["weight"] * (found - shift) / scale
        return (total if self.settings["number"] else total.clamp(min=1e-300).log()).float()

    def tensors(self, name: str, *keys: str) -> list[Tensor]:
        """The tensors whose names begin with this one."""
        return [self.get_buffer(f"{name}_{key}") for key in keys]

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
        columns, at = [], 0
        for width, used, words, _ in self.settings["columns"]:
            for _ in range(used):
                value, at = raw[:, at : at + 1].double(), at + 1
                gap = value.isnan()
                if words:
                    hot = (value == torch.arange(width)).double()
                    value = torch.where(gap, torch.tensor(float("nan")), hot)
                columns += [value, gap.double()]
        return torch.cat(columns, 1)

    def sums(self, part: Any, x: Tensor, raw: Tensor) -> Tensor:
        """The sums (n, K) of a linear model, or of the leaves of trees."""
        name = part["name"]
        if part["scales"]:
            fill, mean, scale = self.tensors(part["scales"], "fill", "mean", "scale")
            x = self.plain(raw)
            x = (torch.where(x.isnan(), fill, x) - mean) / scale
        if part["clip"]:
            x = x.clamp(-part["clip"], part["clip"]).float()
        if part["kind"] == "linear":
            weight, bias = self.tensors(name, "weight", "bias")
            return x.double() @ weight.T + bias
        root, share, feature, left, right, threshold, value = self.tensors(
            name, "root", "share", "feature", "left", "right", "threshold", "value"
        )
        by_bin = part["kind"] == "bins"
        x = self.bins(part, raw) if by_bin else x
        total = torch.zeros(len(x), value.shape[1]).double()
        for first, its_share in torch.stack([root.double(), share], 1).tolist():
            node = torch.full((len(x),), int(first))
            while bool((feature[node] >= 0).any()):
                column = feature[node].long()
                at = x.gather(1, column.clamp(min=0)[:, None])[:, 0]
                if by_bin:
                    goes = (threshold[node, at // 8] >> (7 - at % 8)) & 1 == 1
                else:
                    goes = at <= threshold[node]
                below = torch.where(goes, left[node], right[node]).long()
                node = torch.where(column >= 0, below, node)
            total += its_share * value[node]
        return total

    def bins(self, part: Any, raw: Tensor) -> Tensor:
        """The bins (n, G) of raw columns: 0 for a missing value."""
        if part["owner"] >= 0:
            raw = torch.cat([raw, torch.full((len(raw), 1), float(part["owner"]))], 1)
        signed = (raw + 0.0).view(torch.int32).long() & 0xFFFFFFFF
        keys = torch.where(signed >= 2**31, 2**32 - 1 - signed, signed + 2**31)
        bins = torch.zeros(raw.shape, dtype=torch.long)
        every, lengths, category = self.tensors("bins", "edges", "lengths", "category")
        at = 0
        for f, (length, words) in enumerate(torch.stack([lengths, category], 1).tolist()):
            edges, at = every[at : at + length], at + length
            place = torch.searchsorted(edges, keys[:, f].contiguous(), right=True)
            if words:
                same = torch.cat([raw[:, f, None] == edges, torch.ones(len(raw), 1).bool()], 1)
                place = same.int().argmax(1)
            bins[:, f] = torch.where(raw[:, f].isnan(), 0, place + 1)
        return bins


def network_of(settings: TableSettings) -> nn.Module:
    """The network, without its tensors."""
    with torch.device("meta"):
        return TableNetwork(settings.model_dump())


def network_source() -> str:
    """The source of `Network` in a folder, which finds its settings in `model.json`."""
    text = inspect.getsource(TableNetwork).replace("Any", "object")
    return f"""{text.replace("Tensor", "torch.Tensor")}

class Network(TableNetwork):
    def __init__(self):
        super().__init__(INFO["table"])
"""


def problem(settings: TableSettings, state: Mapping[str, Tensor], inputs: int) -> str:
    """Why settings and tensors of unknown origin cannot predict rows of so many numbers, such as by
    an endless walk through a tree; "" if they can.
    """
    if sum(width for width, *_ in settings.columns) != inputs:
        return f"its columns do not give the {inputs} numbers that its network takes"
    p = sum((width if words else used) + used for width, used, words, _ in settings.columns)
    for part in settings.parts:
        own = {
            name.removeprefix(f"{part.name}_"): value
            for name, value in state.items()
            if name.startswith(f"{part.name}_")
        }
        width = p if part.scales else inputs
        if part.kind == "bins":
            lengths = state["bins_lengths"]
            width = len(lengths)
            if own["threshold"].shape[1] * 8 < int(lengths.max()) + 2:
                return f"{part.name}: a node must have a bit for each bin"
        if part.kind != "linear" and (found := own_models.problem("forest", own, width)):
            return f"{part.name}: {found}"
    return ""
