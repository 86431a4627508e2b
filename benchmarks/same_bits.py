"""Whether two versions of fedloom give the same bits: `python -m benchmarks.same_bits COMMIT`.

Runs every registered method on several engines from two checkouts on one machine: COMMIT in a
temporary worktree, and the present working tree. It compares `state_sha256`, the measured numbers,
the keys of `result.json`, and the `--help` of each command. No hash is committed, because hashes
differ between makes of processors.

    python -m benchmarks.same_bits HEAD~1                   # local, workers, isolated
    python -m benchmarks.same_bits HEAD --engines all       # also batched, memory and ray
    python -m benchmarks.same_bits HEAD --methods fedal split --no-help
    python -m benchmarks.same_bits fab73ae --renamed ways=eval_modes

Ends with status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES: dict[str, dict[str, Any]] = {
    "local": {},
    "workers": {"workers": 2},
    "isolated": {"name": "isolated"},
    "batched": {"name": "batched"},
    "ray": {"name": "ray", "workers": 2},
}
NEW = {"auc", "balanced accuracy", "loss", "calibration error"}
"""Scores of each client at the end, which earlier versions do not have."""
USUAL = ("local", "workers", "isolated")
RUN: dict[str, Any] = {
    "rounds": 2,
    "seed": 9,
    "data": {
        "name": "digits",
        "clients": 4,
        "public_rows": 60,
        "test_rows": 50,
        "own_test_rows": 20,
        "test_fraction": 0.85,
    },
    "faults": {"dropout": 0.05, "crash": 0.05, "nan": 0.05},
    "models": {"pool": ["mlp"], "norm": "batch"},
}
BY_FAMILY: dict[str, dict[str, Any]] = {
    "distillation": {"models": {"pool": ["mlp", "linear", "cnn-small"], "norm": "batch"}},
    "meta": {
        "data": {**RUN["data"], "server_rows": 200},
        "pretrained": {"model": "mlp", "epochs": 2, "norm": "batch"},
    },
    "vertical": {"columns": {"aligned": 24, "unaligned": 20}},
    "tables": {"faults": {"dropout": 0.01}},  # a round is many calls, all of which must succeed
}
BY_METHOD = {"fedlp": BY_FAMILY["meta"]}
SMALL = {
    "tau": 2,
    "batch_size": 8,
    "epochs": 1,
    "neighbours": 2,
    "stage1_rounds": 1,
    "steps": 2,
    "embedding_dim": 40,
    "projection_dim": 40,
    "pretrain_rounds": 1,
    "pretrain_steps": 1,
    "server_steps": 5,
    "centered": True,
    "lot": 4,
    "depth": 3,
}
"""Settings by name, for the methods that have them."""


def main() -> int:
    """Compare; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the version to compare the working tree with")
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, "all"], default=list(USUAL))
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="default: all that are registered"
    )
    parser.add_argument(
        "--renamed",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="keys of result.json that have another name now",
    )
    parser.add_argument("--no-help", action="store_true", help="do not compare the help texts")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    engines = list(ENGINES) if "all" in asked.engines else asked.engines
    if asked.child:
        for key, value in cases(engines, asked.methods):
            print(json.dumps([key, value]), flush=True)
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", f"{asked.commit}^{{commit}}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary) / "checkout"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", other, commit], cwd=ROOT, check=True
        )
        try:
            trees = {"before": other, "now": ROOT}
            children = {name: child(tree, sys.argv[1:]) for name, tree in trees.items()}
            found = {
                name: dict(json.loads(line) for line in one.communicate()[0].splitlines())
                for name, one in children.items()
            }
            failed = [name for name, one in children.items() if one.returncode]
            if failed:
                print(f"The runs of {' and '.join(failed)} ended with an error; see above.")
                return 1
            texts = {name: {} if asked.no_help else helps(tree) for name, tree in trees.items()}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    renamed = dict(pair.split("=", 1) for pair in asked.renamed)
    for entry in found["before"].values():
        if "keys" in entry:
            paths = (key.split(".") for key in entry["keys"])
            entry["keys"] = sorted(
                ".".join(renamed.get(part, part) for part in path) for path in paths
            )
    return report(found, "runs") + report(texts, "help texts") > 0


def child(tree: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """This script in a process that imports the fedloom of `tree`."""
    command = [sys.executable, __file__, *arguments, "--child"]
    return subprocess.Popen(
        command, env=environment(tree), cwd=tree, stdout=subprocess.PIPE, text=True
    )


def environment(tree: Path) -> dict[str, str]:
    """What a process needs to import the fedloom of `tree`."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }


def cases(engines: list[str], chosen: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each method on each engine: what its run comes to."""
    import fedloom
    from fedloom.methods import registry

    for name, method in registry().items():
        if chosen and name not in chosen:
            continue
        values = {**RUN, **BY_FAMILY.get(method.family, {}), **BY_METHOD.get(name, {})}
        fields = method.config.model_fields
        params: dict[str, Any] = {k: v for k, v in SMALL.items() if k in fields}
        for engine in engines:
            try:
                result = fedloom.run(
                    name, **{**values, "params": params, "engine": ENGINES[engine]}
                )
            # the latter: a result that its schema refuses
            except (fedloom.FedloomError, ValueError) as error:
                yield f"{name} on {engine}", {"refused": str(error)}
                continue
            summary = result.summary
            numbers = {
                k: v
                for k, v in summary.items()
                if k in ("accuracy", "own_accuracy", "bytes", "messages", "failures")
            }
            metrics = sorted(
                [*map(str, row)]
                for row in getattr(result, "rows", None) or result.metrics
                if "second" not in str(row[4]) and not is_new(str(row[4]))
            )
            yield (
                f"{name} on {engine}",
                {
                    "state_sha256": summary["state_sha256"],
                    "numbers": hashlib.sha256(
                        json.dumps([numbers, metrics], default=str).encode()
                    ).hexdigest(),
                    "keys": sorted(keys(summary)),
                },
            )


def is_new(metric: str) -> bool:
    """Whether a metric is one of `NEW`, or their mean or deviation over clients."""
    name = metric.removeprefix("own ").removesuffix(" mean").removesuffix(" std")
    return name in NEW and metric != "loss mean"


def keys(value: object, path: str = "") -> Iterator[str]:
    """The paths of all keys in nested mappings."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield f"{path}{key}"
        yield from keys(inner, f"{path}{key}.")


def helps(tree: Path) -> dict[str, str]:
    """The help text of fedloom and of each of its commands."""
    whole = help_of(tree)
    commands = re.findall(r"^│ ([a-z][a-z-]*) ", whole.split("Commands", 1)[-1], re.MULTILINE)
    return {"fedloom": whole, **{command: help_of(tree, command) for command in commands}}


def help_of(tree: Path, *command: str) -> str:
    """What `fedloom COMMAND --help` prints."""
    words = [sys.executable, "-m", "fedloom", *command, "--help"]
    return subprocess.run(
        words, env=environment(tree), cwd=tree, check=True, capture_output=True, text=True
    ).stdout


def report(found: dict[str, dict[str, Any]], of: str) -> int:
    """Print what differs; how many entries do."""
    before, now = found["before"], found["now"]
    differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    for key in differ:
        print(f"differs: {key}: {difference(before.get(key), now.get(key))}")
    same = len({**before, **now}) - len(differ)
    print(f"{of}: {same} the same, {len(differ)} different")
    return len(differ)


def difference(before: Any, now: Any) -> str:
    """In what two entries differ, in a few words."""
    if before is None or now is None:
        return "only " + ("now" if before is None else "before")
    if isinstance(before, str):
        return next(
            (
                f"{a.strip()!r} became {b.strip()!r}"
                for a, b in zip(before.splitlines(), now.splitlines(), strict=False)
                if a != b
            ),
            "length",
        )
    return ", ".join(
        f"keys {sorted(set(before['keys']) ^ set(now['keys']))}"
        if k == "keys" and k in before and k in now
        else f"{k} {str(before.get(k))[:60]} became {str(now.get(k))[:60]}"
        for k in {**before, **now}
        if before.get(k) != now.get(k)
    )


if __name__ == "__main__":
    sys.exit(main())
