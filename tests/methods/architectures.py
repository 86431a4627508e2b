"""Places of clients of several architectures, for methods that average weights among
those of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fedloom.core.context import ClientContext
from fedloom.core.method import Method
from tests.toy import Toy, contexts, network

GROUPS = (0, 1, 2, 0, 1)
"""The group of each of five clients: 20, 30, 40, 50 and 60 rows; the third group is a linear
network.
"""


def architecture(n: int, *, norm: bool = False) -> Any:
    """The toy's network n. A bias before a BatchNorm has a gradient of noise, which Adam blows up:
    there is none.
    """
    module: Any = network(n, norm=norm)
    if norm:
        module[0].bias = None
    return module


def group_networks(groups: Sequence[int], norm: bool = False) -> list[Any]:
    """What makes each group's first network."""
    return [partial(architecture, groups.index(g), norm=norm) for g in range(len({*groups}))]


def client_contexts(groups: Sequence[int] = GROUPS, norm: bool = False) -> list[ClientContext]:
    """A place for each client, with the network of its group."""
    makers = group_networks(groups, norm)

    def make(i: int) -> nn.Module:
        module: nn.Module = makers[groups[i]]()
        return module

    return [
        replace(context, group=g)
        for context, g in zip(contexts(len(groups), make=make), groups, strict=True)
    ]


def grouped(
    method: Method, groups: Sequence[int] = GROUPS, *, norm: bool = False, **settings: Any
) -> Toy:
    """A toy federation of these groups, whose server has the public rows."""
    there = client_contexts(groups, norm)
    server_side = {
        "groups": groups,
        "group_networks": group_networks(groups, norm),
        "public": there[0].public,
    }
    return Toy(method, client_contexts=there, server_side=server_side, **settings)


def size(i: int, groups: Sequence[int] = GROUPS, norm: bool = False) -> int:
    """Bytes of client i's weights and statistics."""
    module = group_networks(groups, norm)[groups[i]]()
    floats = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return sum(x.nbytes for x in floats)
