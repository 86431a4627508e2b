"""The table and the picture of a case, from the folder of its comparison or from its archive.

    fedloom run examples/cases/heart.toml --out runs/heart
    python examples/cases/table.py runs/heart --ratio 0.41 --corrected --picture heart.svg

For each method: accuracy on the clients' own test rows, after fine-tuning where the method has it
(in vertical runs: of the joint prediction), mean over seeds; the difference to the first method, or
the one that `--base` names, paired by seed, with its 95 % interval; the megabytes of a run, and the
seconds of its rounds, without evaluation. Of a number to predict it is the root mean squared error
in the number's unit, of which less is better. `--auc` has the area under the ROC curve times 100 in
place of accuracy, without fine-tuning; `--mode` another measure of the archive, such as "before
tuning" or "5 steps". With `--ratio`, test rows per training row, the interval is that of the
corrected resampled t statistic (Nadeau and Bengio 2003), for seeds that split the same rows anew;
without it, that of the paired t statistic. With `--over clients` it is over clients, each with its
mean over seeds, for a fixed split.

`--corrected` adds Bonferroni's interval for all k differences of the table together, each at a
level of 1 - 0.05 / k: it also holds for the row that looks best. `--only` prints some rows; k
counts all rows of the runs all the same.

`--rates` prints a search in place of differences: rows are named "METHOD RATE", and each method has
the mean of its rates on the rows that choose.

A folder `runs/NAME` that is not there is read from `archive/NAME.json` beside this file, which has
what tables need.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

WIDTH, ROW, LEFT = 640, 24, 190
ARCHIVE = Path(__file__).resolve().parent / "archive"


def values(result: dict[str, Any], auc: bool = False) -> list[float]:
    """The accuracy or AUC of each client, in per cent, or that of the joint prediction; or the
    error of a number.
    """
    if auc:
        each = (
            result["scores"]["auc"]
            if result.get("scores")
            else result["client_scores"]["own auc"]["per_client"]
        )
        return [100 * a for a in (each if isinstance(each, list) else [each])]
    tuned = result["eval_modes"].get("tuned")
    if is_number(result):
        measure = tuned or result["own_rmse"] or result["rmse"]
        return [float(a) for a in measure.get("per_client") or [measure["mean"]]]
    measure = tuned or result["own_accuracy"] or result["accuracy"]
    return [100 * a for a in measure.get("per_client") or [measure["mean"]]]


def is_number(result: dict[str, Any]) -> bool:
    """Whether the run predicts a number."""
    return bool(result.get("task") == "number")


def seconds(result: dict[str, Any]) -> float:
    """The seconds of a run without setup, evaluation and checkpoints; runs in lock-step share
    theirs.
    """
    remarks = (result["engine"] or {}).get("remarks", [])
    runs = [int(r.rsplit(" ", 1)[1]) for r in remarks if r.startswith("in lock-step")]
    spent = sum(
        s
        for part, s in result["seconds"].items()
        if part not in ("total", "setup", "evaluate", "save")
    )
    return spent / (runs or [1])[0]


def measures(result: dict[str, Any]) -> dict[str, list[float]]:
    """Measure -> value of each client, or of the joint prediction, rounded to what an archive
    keeps.
    """
    found = {"rmse" if is_number(result) else "accuracy": values(result)}
    if not is_number(result):
        plain = result["own_accuracy"] or result["accuracy"]
        found["before tuning"] = [100 * a for a in plain.get("per_client") or [plain["mean"]]]
        if result.get("scores") or "own auc" in (result.get("client_scores") or {}):
            found["auc"] = values(result, auc=True)
    for mode, measure in result["eval_modes"].items():
        if mode.endswith(("step", "steps")):
            found[mode] = [100 * a for a in measure["per_client"]]
    return {name: [round(x, 4) for x in each] for name, each in found.items()}


def record(result: dict[str, Any]) -> dict[str, Any]:
    """What an archive keeps of a run."""
    return {
        "name": result["name"],
        "seed": result["seed"],
        "measures": measures(result),
        "bytes": sum(result["bytes"].values()),
        "seconds": round(seconds(result), 2),
        "test_sha256": result["test_sha256"],
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder's runs, in the order of the comparison; of its archive, if the folder
    is not there.
    """
    archive = ARCHIVE / f"{folder.name}.json"
    if not folder.exists() and archive.exists():
        return list(json.loads(archive.read_text(encoding="utf-8"))["runs"])
    found = []
    for comparison in sorted(folder.rglob("comparison.json")):
        for run in json.loads(comparison.read_text())["runs"]:
            found.append(
                record(json.loads((comparison.parent / run["folder"] / "result.json").read_text()))
            )
    return found


def read(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Method -> seed -> record, in the order of the comparison."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in records(folder):
        found.setdefault(run["name"], {})[run["seed"]] = run
    return found


class Gap(NamedTuple):
    """A mean difference with its 95 % interval."""

    mean: float
    low: float
    high: float


def difference(
    a: list[list[float]], b: list[list[float]], ratio: float, over: str, rows: int = 1
) -> Gap:
    """The mean of a - b with its interval, infinite for fewer than 3; each has clients' values for
    each seed. The interval holds for this many differences together.
    """
    gaps = np.array(a) - np.array(b)  # (R, N)
    each = gaps.mean(0) if over == "clients" else gaps.mean(1)
    mean, count = float(each.mean()), len(each)
    half = float("inf")
    if count > 2:
        half = (
            float(stats.t.ppf(1 - 0.025 / rows, count - 1))
            * float(each.std(ddof=1))
            * (1 / count + ratio) ** 0.5
        )
    return Gap(mean, mean - half, mean + half)


def signed(number: float) -> str:
    """`+1.6`, or `−0.2` with a minus sign."""
    return f"{number:+.1f}".replace("-", "−")


def picture(rows: list[tuple[str, float, float, float]], title: str, better: int = 1) -> str:
    """A forest plot of differences with their intervals, as SVG. `better`: 1 if more is, -1 if less
    is.
    """
    reach = max(1.0, *(abs(x) for _, *bounds in rows for x in bounds))
    place = lambda x: LEFT + (WIDTH - LEFT - 20) * (x + reach) / (2 * reach)
    axis, height = ROW * (len(rows) + 0.4), ROW * (len(rows) + 2)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if reach / s <= 4)
    ticks = [n * step for n in range(-int(reach // step), int(reach // step) + 1)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<line x1="{place(0):.1f}" x2="{place(0):.1f}" y1="6" y2="{axis:.1f}" stroke="#999"/>',
    ]
    for tick in ticks:
        at = f'x="{place(tick):.1f}" y="{axis + 14:.1f}"'
        parts.append(
            f'<text {at} font-size="11" text-anchor="middle" fill="#57606a">{tick:+d}</text>'.replace(  # noqa: E501
                "+0<", "0<"
            )
        )
    for n, (name, mean, low, high) in enumerate(rows):
        y = ROW * (n + 0.8)
        worst, best = sorted((better * low, better * high))
        color = "#1a7f37" if worst > 0 else "#b42318" if best < 0 else "#57606a"
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 4:.1f}" font-size="13" text-anchor="end">{name}</text>',
            f'<line x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{color}"/>',
            f'<circle cx="{place(mean):.1f}" cy="{y:.1f}" r="4" fill="{color}"/>',
        ]
    parts.append(
        f'<text x="{WIDTH / 2}" y="{height - 8}" font-size="13" '
        f'text-anchor="middle">{title}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def each_client(
    found: dict[str, dict[int, dict[str, Any]]], measure: str, names: list[str], only: list[str]
) -> str:
    """A table with each client's mean over seeds."""
    lines = [f"| {measure} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name in only or found:
        means = np.mean([run["measures"][measure] for run in found[name].values()], 0)
        lines.append(f"| {name} | {' | '.join(f'{x:.1f}' for x in means)} |")
    return "\n".join(lines)


def searched(
    found: dict[str, dict[int, dict[str, Any]]], measure: str
) -> dict[str, dict[str, float]]:
    """Method -> rate -> mean over clients and seeds, of runs that are named "METHOD RATE"."""
    means: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        method, rate = name.rsplit(" ", 1)
        means.setdefault(method, {})[rate] = float(
            np.mean([run["measures"][measure] for run in runs.values()])
        )
    return means


def chosen(rates: dict[str, float], measure: str) -> str:
    """The best rate; the first of equal ones, and none where training diverged."""
    finite = [rate for rate in rates if np.isfinite(rates[rate])]
    return min(finite, key=lambda rate: rates[rate] if measure == "rmse" else -rates[rate])


def search(found: dict[str, dict[int, dict[str, Any]]], measure: str) -> str:
    """A table with the chosen rate of each method, and the means of all that were tried."""
    lines = ["| method | chosen rate | all that were tried |", "|---|---|---|"]
    for method, rates in searched(found, measure).items():
        shown = {
            rate: f"{mean:.1f}" if np.isfinite(mean) else "diverged" for rate, mean in rates.items()
        }
        tried = ", ".join(f"{rate}: {mean}" for rate, mean in shown.items())
        lines.append(f"| {method} | {chosen(rates, measure)} | {tried} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ratio", type=float, default=0.0, help="test rows per training row")
    parser.add_argument("--over", choices=["seeds", "clients"], default="seeds")
    parser.add_argument("--auc", action="store_true", help="AUC in place of accuracy")
    parser.add_argument("--mode", help="another measure of the archive")
    parser.add_argument("--base", help="the method to compare with; default: the first")
    parser.add_argument("--only", help="some methods, with commas between")
    parser.add_argument(
        "--corrected", action="store_true", help="intervals for all differences together, too"
    )
    parser.add_argument(
        "--clients", help="each client's mean instead, by these names, with commas between"
    )
    parser.add_argument("--rates", action="store_true", help="the rates that were tried instead")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found = read(options.folder)
    first = options.base or next(iter(found))
    seeds = sorted(found[first])
    number = "rmse" in found[first][seeds[0]]["measures"]
    measure = options.mode or ("auc" if options.auc else "rmse" if number else "accuracy")
    only = options.only.split(",") if options.only else []
    if options.rates:
        print(search(found, measure))
        return
    if options.clients:
        print(each_client(found, measure, options.clients.split(","), only))
        return
    what = {"auc": "AUC", "rmse": "RMSE"}.get(measure, measure)
    wide, k = options.corrected, len(found) - 1
    extra = (f" corrected for {k} |", "---|") if wide else ("", "")
    print(
        f"| method | {what} | minus {first} | 95 % interval |{extra[0]} MB | s "
        f"|\n|---|---|---|---|{extra[1]}---|---|"
    )
    drawn = []
    base = [found[first][seed]["measures"][measure] for seed in seeds]
    for name in only or found:
        runs = [found[name][seed] for seed in seeds]
        scores = [run["measures"][measure] for run in runs]
        gaps = [
            difference(scores, base, options.ratio, options.over, n)
            for n in ((1, k) if wide else (1,))
        ]
        intervals = [
            "–" if name == first else f"{signed(gap.low)} to {signed(gap.high)}" for gap in gaps
        ]
        minus = "–" if name == first else signed(gaps[0].mean)
        mean, sent, time = (
            float(np.mean(x))
            for x in (scores, [r["bytes"] for r in runs], [r["seconds"] for r in runs])
        )
        print(
            f"| {name} | {mean:.1f} | {minus} | {' | '.join(intervals)} | {sent / 1e6:.1f} | "
            f"{time:.0f} |"
        )
        if name != first:
            drawn.append((name, *gaps[0]))
    if options.picture:
        title = (
            f"{what} minus {first}, less is better" if number else f"points of {what} minus {first}"
        )
        options.picture.write_text(
            picture(drawn, f"{title}, with 95 % intervals", -1 if number else 1)
        )


if __name__ == "__main__":
    main()
