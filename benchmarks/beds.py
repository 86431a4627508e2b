"""Beds with headroom for the headline of each of four papers, and the headline on them.

    python -m benchmarks.beds search fedal afind evfl augfl
    python -m benchmarks.beds verdict fedal afind evfl augfl
    python -m benchmarks.beds table

All are of scikit-learn's digits, whatever data the paper has. `search` compares an oracle with the
rival on validation rows, with a seed that the verdict lacks, on beds from the smallest up, and
stops at the first where the oracle is at least the printed effect above. There each row's rate is
the best of equally many, by validation rows of two seeds. `verdict` runs all rows there with ten
seeds. Each run is a line of benchmarks/archive/beds.jsonl; a run that is there is not repeated.
docs/results/beds.md has its table, and tests/test_archived.py runs a cell of it again.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from benchmarks import archived
from benchmarks.archived import SEARCH_SEED, SEEDS, merged


class Headline(NamedTuple):
    """A claim: its printed effect in points, its rows by role, the beds from small to large, and
    rates to choose from.

    A row may have rates of its own, equally many; without any it has those of the library, or of
    `common`.
    """

    effect: float
    measure: str
    rows: dict[str, dict[str, Any]]
    beds: dict[str, dict[str, Any]]
    common: dict[str, Any]
    rates: Mapping[str, Sequence[float]]


def _distillation(rows: int, alpha: float) -> dict[str, Any]:
    return {"options": {"rows": rows, "alpha": alpha}}


HEADLINES = {
    "fedal": Headline(
        effect=4.0,  # FedAL over FedMD, Table VII, mean of three columns
        measure="accuracy",
        rows={
            "rival": {"name": "FedMD, τ = 5", "method": "fedmd", "params": {"tau": 5}},
            "oracle": {
                "name": "pooled",
                "method": "local",
                "data": {"clients": 3, "options": {"alpha": 1e6}},
            },
            "alone": {"name": "Local", "method": "local"},
            "method": {
                "name": "FedAL",
                "method": "fedal",
                "rates": {"lr": (0.001, 0.003, 0.006, 0.01), "disc_lr": (0.0001, 0.01)},
            },
            "FedMD-LF": {"name": "FedMD-LF", "method": "fedmd-lf"},
        },
        beds={
            f"α = {alpha:g}, {rows} rows a client": {"data": _distillation(rows, alpha)}
            for rows in (20, 40, 80)
            for alpha in (1.0, 0.1)
        },
        common={
            "iterations": 120,
            "data": {
                "name": "digits",
                "clients": 6,
                "partition": "dirichlet",
                "public_rows": 300,
                "test_rows": 360,
            },
            "models": {"pool": ["mlp"]},
        },
        rates={"lr": (0.0003, 0.0006, 0.001, 0.002, 0.003, 0.006, 0.01, 0.02)},
    ),
    "afind": Headline(
        effect=6.4,  # AFIND+ over Gossip, Table 1, mean of the two pathological columns of CIFAR-10
        measure="tuned",
        rows={
            "rival": {"name": "gossip", "method": "gossip", "params": {"neighbours": 3}},
            "oracle": {
                "name": "gossip in the true group",
                "method": "gossip",
                "params": {"neighbours": "none"},
                "topology": {"kind": "groups", "groups": 3},
            },
            "alone": {"name": "alone", "method": "alone"},
            "method": {"name": "AFIND+", "method": "afind-plus"},
            "FedeRiCo": {"name": "FedeRiCo", "method": "federico", "params": {"neighbours": 3}},
            "top 3": {
                "name": "AFIND+, top 3",
                "method": "afind-plus",
                "params": {"threshold": "top", "top": 3},
            },
            "calibrated": {
                "name": "AFIND+, calibrated, υ = 0.25",
                "method": "afind-plus",
                "params": {"threshold": "calibrated", "upsilon": 0.25},
            },
            "anchored": {"name": "AFIND+, anchored", "method": "afind-plus", "preset": "anchored"},
        },
        beds={
            f"{rows} rows a peer, {'own' if head else 'no own'} heads": {
                "params": {"personal_head": head},
                "data": {"options": {"number": 3, "rows": rows}},
            }
            for head in (True, False)
            for rows in (4, 8, 16)
        },
        common={
            "rounds": 30,
            "params": {"batch_size": 32, "epochs": 1, "lr": 0.05},
            "data": {
                "name": "digits",
                "clients": 12,
                "partition": "groups",
                "public_rows": 0,
                "own_test_rows": 100,
            },
            "models": {"pool": ["mlp"]},
        },
        rates={"lr": (0.01, 0.02, 0.05, 0.1, 0.2)},
    ),
    "evfl": Headline(
        effect=9.2,  # Proto-EVFL over Vanilla VFL, Table IV, mean of seven columns of Fashion-MNIST
        measure="accuracy",
        rows={
            "rival": {"name": "split learning", "method": "split"},
            "oracle": {"name": "pooled", "method": "pooled"},
            "alone": {"name": "active party alone", "method": "active-only"},
            "method": {
                "name": "Proto-EVFL",
                "method": "proto-evfl",
                "rates": {"lr": (1e-6, 1e-5, 1e-4, 1e-3), "active_lr": (0.001, 0.01)},
            },
            "library": {
                "name": "Proto-EVFL, rates of the library",
                "method": "proto-evfl",
                "rates": {},
            },
            "proto-student": {"name": "proto-student", "method": "proto-student"},
        },
        beds={f"{aligned} aligned": {"columns": {"aligned": aligned}} for aligned in (30, 60, 120)},
        common={
            "rounds": 20,
            "data": {"name": "digits", "clients": 4, "test_rows": 360},
            "columns": {"unaligned": 200},
        },
        rates={"lr": (0.0003, 0.001, 0.003, 0.01), "active_lr": (0.001, 0.01)},
    ),
    "augfl": Headline(
        effect=3.3,  # AugFL with its pretrained model over AugFL without, Table II, Fashion-MNIST
        measure="1 step",
        rows={
            "rival": {"name": "AugFL without the model", "method": "augfl", "params": {"lam": 0.0}},
            "oracle": {
                "name": "the server's labels in its place",
                "method": "augfl",
                "params": {"crd": 0.0, "ce": 1.0},
            },
            "alone": {"name": "no training", "method": "local-only", "rates": {}},
            "method": {"name": "AugFL", "method": "augfl"},
            "KL": {
                "name": "AugFL, KL in place of CRD",
                "method": "augfl",
                "params": {"crd": 0.0, "kl": 1.0},
            },
        },
        beds={
            f"{rows} rows a client, {rounds} rounds": {
                "rounds": rounds,
                "data": {"options": {"rows": rows}},
            }
            for rows in (6, 10)
            for rounds in (15, 40)
        },
        common={
            "params": {"adapt_steps": [1, 5], "alpha": 0.1},
            "data": {
                "name": "digits",
                "clients": 20,
                "partition": "random-classes",
                "server_rows": 400,
                "unseen": 0.2,
                "public_rows": 0,
                "own_test_rows": 50,
            },
            "models": {"pool": ["mlp"]},
            "pretrained": {"model": "cnn"},
        },
        rates={"meta_lr": (0.02, 0.05, 0.1, 0.2, 0.4)},
    ),
}


TITLES = {
    "fedal": "FedAL over FedMD",
    "afind": "AFIND+ over gossip",
    "evfl": "Proto-EVFL over split learning",
    "augfl": "AugFL with its pretrained model over AugFL without",
}
ROLES = {"rival": " (the rival)", "oracle": " (the oracle)"}


def settings(headline: Headline, bed: str, role: str, rate: str = "") -> dict[str, Any]:
    """The settings of a role's runs on a bed, at one of its rates, or at those of the library."""
    row = {key: value for key, value in headline.rows[role].items() if key not in ("name", "rates")}
    out = merged(
        headline.common,
        headline.beds[bed],
        row,
        {"params": rates(headline, role)[rate]} if rate else {},
    )
    # other rows of the same data: as many as all clients hold and the public ones, at most 220
    if role == "oracle" and row["method"] == "local":
        data = headline.common["data"]
        rows = headline.beds[bed]["data"]["options"]["rows"] * data["clients"] + data["public_rows"]
        out = merged(out, {"data": {"options": {"rows": min(rows, 220)}}})
    return out


def rates(headline: Headline, role: str) -> dict[str, dict[str, float]]:
    """The rates that a role chooses from, in words, and as settings."""
    given = headline.rows[role].get("rates", headline.rates)
    found = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
    return {", ".join(f"{key} {value:g}" for key, value in one.items()): one for one in found}


def measured(
    name: str, bed: str, role: str, seeds: Sequence[int], *, validation: bool, rate: str = ""
) -> dict[int, float]:
    """Seed -> the measure of a role on a bed."""
    run = merged(
        settings(HEADLINES[name], bed, role, rate),
        {"data": {"validation": 0.25}} if validation else {},
    )
    about = {"headline": name, "bed": bed, "role": role, "validation": validation, "rate": rate}
    return archived.measured("beds", about, run, seeds, HEADLINES[name].measure)


def searched(name: str) -> str | None:
    """The smallest bed where the oracle is at least the effect above the rival, on validation rows;
    None if none is.
    """
    for bed in HEADLINES[name].beds:
        rival, oracle = (
            measured(name, bed, role, [SEARCH_SEED], validation=True)
            for role in ("rival", "oracle")
        )
        above = oracle[SEARCH_SEED] - rival[SEARCH_SEED]
        print(
            f"{name}: {bed}: oracle {oracle[SEARCH_SEED]:.1f}, {above:+.1f} above the rival",
            flush=True,
        )
        if above >= HEADLINES[name].effect:
            return bed
    return None


def chosen(name: str, bed: str, role: str) -> str:
    """The rate of a role with the highest mean on validation rows of the seeds of searches; the
    first of equal ones.
    """
    seeds = [SEARCH_SEED, SEARCH_SEED - 1]

    def mean(rate: str) -> float:
        return sum(measured(name, bed, role, seeds, validation=True, rate=rate).values())

    tried = [*rates(HEADLINES[name], role)]
    return max(tried, key=mean) if len(tried) > 1 else tried[0]


def table() -> str:
    """The archived verdicts, in Markdown."""
    lines = ["| row | rate | accuracy | minus the rival |", "|---|---|---|---|"]
    for name, headline in HEADLINES.items():
        about = {"headline": name, "role": "rival", "validation": False}
        if len(archived.found("beds", about)) < len(SEEDS):
            continue
        bed = next(line["bed"] for line in archived.read("beds") if about.items() <= line.items())
        top, low = (
            measured(name, bed, role, [SEARCH_SEED], validation=True)
            for role in ("oracle", "rival")
        )
        room = (
            f"printed +{headline.effect:g}; oracle {top[SEARCH_SEED] - low[SEARCH_SEED]:+.1f} on "
            "validation rows"
        )
        lines.append(f"| **{TITLES[name]}**, {bed}; {room} | | | |")
        rival: dict[int, float] = {}
        for role, row in headline.rows.items():
            if not archived.found("beds", {**about, "role": role}):
                continue
            rate = chosen(name, bed, role)
            values = archived.found("beds", {**about, "role": role, "rate": rate})
            if len(values) < len(SEEDS):
                continue
            rival = rival or values
            minus = "–" if role == "rival" else archived.difference(values, rival)
            lines.append(
                f"| {row['name']}{ROLES.get(role, '')} | {rate or '–'} | {archived.mean(values)} "
                f"| {minus} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search or judge these headlines, or print the table of what is archived."""
    task, *names = sys.argv[1:]
    if task == "table":
        print(table(), end="")
    for name in names:
        bed = searched(name)
        for role in HEADLINES[name].rows if bed else []:
            rate = chosen(name, bed or "", role)
            print(f"{name}: {bed}: {role}: {rate}", flush=True)
            if task == "verdict":
                values = measured(name, bed or "", role, [*SEEDS], validation=False, rate=rate)
                print(
                    f"{name}: {bed}: {role}: {sum(values.values()) / len(values):.1f}", flush=True
                )


if __name__ == "__main__":
    main()
