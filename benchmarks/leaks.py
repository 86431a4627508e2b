"""What the messages of every method tell: `python -m benchmarks.leaks [ROUNDS] [SEED] [METHODS…]`.

It prints the table of docs/leaks.md. Ten clients share scikit-learn's digits, with class shares
from a Dirichlet distribution (α = 0.5); vertical methods have three parties besides the active one.
Each method runs with its recommended settings, an MLP and few rounds.
"""

import sys
from typing import Any

from fedloom.api import execute
from fedloom.core.errors import FedloomError
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.result import MeasuredLeak
from fedloom.methods import registry

HORIZONTAL = {
    "name": "digits",
    "clients": 10,
    "public_rows": 200,
    "test_rows": 400,
    "partition": "dirichlet",
    "options": {"alpha": 0.5},
}
SERVER = {"pretrained": {"model": "mlp", "epochs": 5}}
ATTACKS = ("labels", "class shares", "membership", "reconstruction", "row labels")


def run_of(name: str, rounds: int, seed: int) -> Any:
    """The config of a method's run."""
    method = registry()[name]
    values: dict[str, Any] = {
        "method": name,
        "rounds": rounds,
        "seed": seed,
        "evaluate": {"points": 1, "leaks": True},
    }
    if method.setting == "vertical":
        return check({"run": {**values, "data": {"name": "digits"}}}).run
    values |= {"data": HORIZONTAL, "models": {"pool": ["mlp"], "norm": "none"}}
    if "pretrained server model" in method.needs or method.family == "meta":
        values |= {**SERVER, "data": {**HORIZONTAL, "server_rows": 200}}
    elif "server rows" in method.needs:
        values |= {"data": {**HORIZONTAL, "server_rows": 200}}
    return check({"run": values}).run


def shown(one: MeasuredLeak) -> str:
    """A success and chance in per cent, in bold if the interval of their difference is above 0."""
    value = f"{100 * one.success:.0f} ({100 * one.chance:.0f})"
    return f"**{value}**" if one.gain is not None and one.gain[0] > 0 else value


def main(rounds: int, seed: int, *names: str) -> None:
    """Print the table."""
    print(f"| method | message | {' | '.join(ATTACKS)} |")
    print("|---|---|" + "---|" * len(ATTACKS))
    for name in names or registry():
        try:
            result = execute(run_of(name, rounds, seed))
        except FedloomError as error:
            print(f"| `{name}` | {str(error)[:100]} |", flush=True)
            continue
        rows: dict[str, dict[str, str]] = {}
        for found in result.summary["leaks"]:
            one = MeasuredLeak(**found)
            rows.setdefault(one.message, {})[one.attack] = shown(one)
        for message, cells in rows.items() or [("–", {})]:
            print(
                f"| `{name}` | {message} | {' | '.join(cells.get(a, '–') for a in ATTACKS)} |",
                flush=True,
            )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 25, int(given[1]) if len(given) > 1 else 0, *given[2:])
