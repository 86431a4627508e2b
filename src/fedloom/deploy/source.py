"""The source of a network as one plain PyTorch class, from a trace of its forward pass."""

import re
from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedloom.core.errors import ModelError
from fedloom.core.party import Party

_KNOWN = {"inf", "nan", "NoneType", "torch", "device", "pytree", "fx_pytree", "getattr"}
"""Names that the code of every graph may use."""


class _Traced:
    """A party whose network is replaced by a module to trace; its methods and state are the
    party's.
    """

    def __init__(self, party: Party[object], network: nn.Module) -> None:
        self.cfg, self.context, self._kind = party.cfg, party.context, type(party)
        self.net = SimpleNamespace(infer=lambda x, **_: network(x), module=network)
        self.params, self.buffers = dict(network.named_parameters()), dict(network.named_buffers())
        vars(self).update(party.own_state())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kind, name)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        return MethodType(found, self) if callable(found) else found


class _Inference(nn.Module):
    """The predictions of a party whose page overrides `infer`, as a module that can be traced."""

    def __init__(self, party: Party[object]) -> None:
        super().__init__()
        self.network = party.net.module
        self._party = _Traced(party, self.network)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, K)."""
        out: Tensor = self._party.infer(x)
        return out


def traced(party: Party[object]) -> fx.GraphModule:
    """The network of a party, or its predictions where its page overrides `infer`, as a traced
    module.

    Raises:
        ModelError: its forward pass depends on values, so it has no fixed graph.
    """
    own = type(party).infer is not Party.infer
    module = _Inference(party) if own else party.net.module
    try:
        graph = fx.symbolic_trace(module.eval())
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the network of a {type(party).__name__} cannot be traced ({why}): predict in "
            "Python, with the result's models"
        ) from None
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def source(module: fx.GraphModule) -> str:
    """The lines of a class `Network` that needs torch alone; its state dict has the names of
    `module`'s.

    Raises:
        ModelError: the graph has something that is not torch's.
    """
    needed = module.graph.python_code("self").globals
    foreign = [name for name in needed if name not in _KNOWN and not name.startswith("torch")]
    if foreign:
        raise ModelError(
            f"the forward pass of a network uses {foreign[0]}, which is not a function of torch"
        )
    lines = ["class Network(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in _layers(module)]
    code = module.graph.python_code("self").src.replace(
        "torch._C._nn.linear", "nn.functional.linear"
    )
    body = re.sub(r";\s+\w+ = (?:\w+ = )*None", "", code)
    body = re.sub(r"\s+#[^\n\"]*$", "", body, flags=re.M)  # fx's remarks
    forward = [line for line in body.strip().splitlines() if line.strip()]
    inputs = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ModelError(
            f"the forward pass of a network must take one input, not {', '.join(inputs) or 'none'}"
        )
    forward[0] = f"def forward(self, {inputs[0]}):"
    return "\n".join([*lines, "", *(f"    {line}" for line in forward), ""])


def _layers(module: fx.GraphModule) -> list[str]:
    """Statements that make the layers, parameters and buffers that the graph uses, each under its
    name.
    """
    used: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            used[str(node.target)] = _constructor(module.get_submodule(str(node.target)))
        elif node.op == "get_attr":
            used.update(_tensor(module, str(node.target)))
    lines, made = [], {""}
    for name, text in used.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            if (parent := ".".join(parts[:end])) not in made and parent not in used:
                made.add(parent)
                lines.append(_register(parent, "add_module", "nn.Module()"))
        kind, _, value = text.partition(" ")
        lines.append(_register(name, kind, value))
    return lines


def _register(name: str, kind: str, value: str) -> str:
    """`self.body.head = value` where these are names of Python, otherwise with `add_module` and its
    like.
    """
    *parents, own = name.split(".")
    owner = "self"
    for end, parent in enumerate(parents, 1):
        owner = (
            f"{owner}.{parent}"
            if parent.isidentifier()
            else f'self.get_submodule("{".".join(parents[:end])}")'
        )
    return (
        f"{owner}.{own} = {value}"
        if own.isidentifier() and kind != "register_buffer"
        else f'{owner}.{kind}("{own}", {value})'
    )


def _constructor(layer: nn.Module) -> str:
    """`add_module nn.Linear(…)`, from the layer's own repr, which torch writes as its constructor's
    arguments.
    """
    text = repr(layer)
    kind = type(layer)
    if getattr(nn, kind.__name__, None) is not kind or "\n" in text:
        raise ModelError(f"a network has a layer {kind.__name__} that is not one of torch.nn")
    return f"add_module nn.{text}"


def _tensor(module: fx.GraphModule, name: str) -> Mapping[str, str]:
    path, _, own = name.rpartition(".")
    value = getattr(module.get_submodule(path), own)
    empty = f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
    kind = (
        f"register_parameter nn.Parameter({empty})"
        if isinstance(value, nn.Parameter)
        else f"register_buffer {empty}"
    )
    return {name: kind}


def state_of(module: fx.GraphModule) -> dict[str, Tensor]:
    """The tensors of the layers that the graph uses, by name, contiguous."""
    used = {
        str(node.target) for node in module.graph.nodes if node.op in ("call_module", "get_attr")
    }
    every = dict(module.named_parameters(remove_duplicate=False))  # two layers may share one
    every |= dict(module.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in every.items()
        if name in used or name.rpartition(".")[0] in used
    }
