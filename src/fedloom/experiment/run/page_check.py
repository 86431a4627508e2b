"""Checks a method page: common mistakes in its source, and small runs on three engines that must
agree.
"""

import ast
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from fedloom import methods
from fedloom.core.errors import FedloomError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import check, read_values
from fedloom.experiment.run.execute import RunResult, execute

STEPS = ("minimize", "gradient", "gradient_at", "curvature_at", "row_gradients", "train")
"""Methods of `Party` whose first argument is a loss."""
TOLERANCE = 0.02
"""Largest difference in accuracy between the local and the batched engine, which sums in another
order.
"""


def problems(
    page: str, settings: list[str], run: Callable[..., RunResult] = execute
) -> Iterator[tuple[str, str]]:
    """The problems of a page, as (what was checked, sentence); a sentence is "" for a check without
    a problem.

    Args:
        page: `FILE.py` or `FILE.py:NAME`.
        settings: overrides of the small run, as `dotted.key=value`.
        run: executes one run.

    Raises:
        FedloomError: the page cannot be imported, or the settings are invalid.
    """
    method = methods.load(page)
    source = Path(page.partition(".py:")[0].removesuffix(".py") + ".py").read_text(encoding="utf-8")
    found = list(in_source(source))
    yield from (("source", text) for text in found or [""])
    small = {"clients": 4, "test_rows": 200, "own_test_rows": 20, "public_rows": 60}
    values = read_values(page, settings, {"rounds": 3, "seed": 1})
    values["data"] = {**small, **values.get("data", {})}
    if method.setting == "vertical":
        values["data"] = {
            key: value
            for key, value in values["data"].items()
            if key in ("name", "clients", "test_rows")
        }
    results: dict[str, RunResult] = {}
    for engine in ("local", "isolated", "batched"):
        config: RunConfig = check({"run": {**values, "engine": {"name": engine}}}).run
        try:
            results[engine], said = _with_warnings(run, config)
        except FedloomError as error:
            yield engine, str(error)
            continue
        yield from ((engine, text) for text in said or [""])
    yield from _differences(results)


def _differences(results: dict[str, RunResult]) -> Iterator[tuple[str, str]]:
    """The differences between the results of the engines."""
    if len(results) < 3:
        return
    local, isolated, batched = (results[name].summary for name in ("local", "isolated", "batched"))
    same = local["state_sha256"] == isolated["state_sha256"]
    yield (
        "local = isolated",
        ""
        if same
        else "the results differ if each party is rebuilt for every call: declare what must "
        "persist in STATE, and draw random numbers from self.stream",
    )
    a, b = local["accuracy"]["mean"], batched["accuracy"]["mean"]
    close = abs(a - b) <= TOLERANCE or (math.isnan(a) and math.isnan(b))
    text = (
        f"accuracy is {a:.1%} with engine local, but {b:.1%} with batched: change no tensor of a "
        "message in place"
    )
    yield "local = batched", "" if close else text


def _with_warnings(run: Callable[..., RunResult], config: RunConfig) -> tuple[RunResult, list[str]]:
    """A run, and the warnings that it logged."""
    said: list[str] = []
    handler = logging.Handler("WARNING")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fedloom")
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        return run(config), list(dict.fromkeys(said))
    finally:
        log.propagate = before
        log.removeHandler(handler)


def in_source(text: str) -> Iterator[str]:
    """Common mistakes in the source of a page."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            yield from _params_in_losses(function)
            yield from _counts(function)


def _params_in_losses(function: ast.FunctionDef) -> Iterator[str]:
    """`self.params` within a loss, or a variable that is `self.params`."""
    aliases = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "self.params"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    local = {
        node.name: node
        for node in ast.walk(function)
        if isinstance(node, ast.FunctionDef) and node is not function
    }
    for call in ast.walk(function):
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in STEPS
        ):
            continue
        for argument in call.args:
            loss = local.get(argument.id) if isinstance(argument, ast.Name) else argument
            for node in ast.walk(loss) if isinstance(loss, ast.Lambda | ast.FunctionDef) else ():
                named = isinstance(node, ast.Name) and node.id in aliases
                if named or (
                    isinstance(node, ast.Attribute) and ast.unparse(node) == "self.params"
                ):
                    yield (
                        f"line {call.lineno}: self.params in a loss has no gradient: use self.live"
                    )


def _counts(function: ast.FunctionDef) -> Iterator[str]:
    """`len(self.data)` in what a method returns: messages have tensors, which the batched engine
    can stack.
    """
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Return)
            and node.value is not None
            and "len(self.data)" in ast.unparse(node.value)
        ):
            yield (
                f"line {node.lineno}: a message has len(self.data), a number: send "
                "self.row_count, a tensor"
            )
