"""The archive of runs: pages without folders, merging, and time budgets."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from papers.tests.conftest import Made
from papers.tests.tiny import TINY

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.config.duration import seconds_of
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan import node_party
from fedloom.experiment.plan.run_digest import digest
from fedloom.experiment.pool.pool import Ended, Standing
from fedloom_papers import page
from fedloom_papers.archive import Archive
from fedloom_papers.budget import Batch, batches, spend
from fedloom_papers.keys import archive_key
from fedloom_papers.plan import Plan, plan, run_plan
from fedloom_papers.spec import Reproduction, parsed

NAME = "afind-table-1"


@pytest.fixture(scope="module")
def archive(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """The archive of the small table, written with its page."""
    found = Archive(tmp_path_factory.mktemp("archive"))
    page.write(
        made.reproduction,
        "small",
        made.cells,
        made.folder,
        found.folder.parent / NAME,
        archive=found,
    )
    return found


def test_a_line_has_the_numbers_and_their_provenance(made: Made, archive: Archive) -> None:
    records = archive.read("small", NAME)
    assert len(records) == 12 and len({one.config for one in records.values()}) == 4
    (file,) = archive.folder.glob("*/*.jsonl")
    assert max(map(len, file.read_text().splitlines())) < 2000
    for cell in made.cells:
        for run in cell.runs:
            result = json.loads((made.folder(run) / "result.json").read_text())
            (one,) = (
                r
                for r in records.values()
                if r.state_sha256 == result["state_sha256"] and r.cell == cell.name
            )
            assert one.metrics["accuracy"] == result["accuracy"]["mean"] and one.seed == run.seed
            assert {*one.metrics} >= {"accuracy", "own accuracy", "bytes"}
            assert (
                one.test_sha256 == result["test_sha256"]
                and one.chances["accuracy"] == result["chance"]
            )
            assert {"fedloom", "commit", "processor", "torch", "started"} <= one.environment.keys()


def test_archived_runs_are_found_by_a_later_version(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run for cell in made.cells for run in cell.runs]
    before = [(archive_key(run), digest(run)) for run in runs]
    monkeypatch.setattr(node_party, "__version__", "9.0")
    for run, (key, identity) in zip(runs, before, strict=True):
        assert archive_key(run) == key and digest(run) != identity


def test_pages_are_rebuilt_without_the_runs(made: Made, archive: Archive, tmp_path: Path) -> None:
    bare = made.reproduction.model_copy(update={"pictures": ()})

    def gone(run: RunConfig) -> Path:
        return tmp_path / "gone" / made.folder(run).name

    with_runs = page.write(bare, "small", made.cells, made.folder, tmp_path / "a" / NAME)
    without = page.write(bare, "small", made.cells, gone, tmp_path / "b" / NAME, archive=archive)
    assert without == with_runs
    assert (tmp_path / "a" / NAME / "table.csv").read_text() == (
        tmp_path / "b" / NAME / "table.csv"
    ).read_text()
    assert "archived" in (tmp_path / "b" / NAME / "index.html").read_text()


def test_a_run_of_another_table_counts_if_it_has_what_is_needed(
    made: Made, archive: Archive
) -> None:
    more = made.reproduction.model_copy(update={"metric": "seconds"})
    for wanted, number in ((made.reproduction, 12), (more, 0)):
        assert len(archive.usable("small", "another", wanted)) == number
    # its own: what was not measured is not run again
    assert len(archive.usable("small", NAME, more)) == 12


def test_another_machine_s_archive_merges(archive: Archive, tmp_path: Path) -> None:
    """Each has a part; both orders give the same file, and a run that both have counts once."""
    records = [*archive.read("small", NAME).values()]
    ours, theirs, turned = (Archive(tmp_path / name) for name in ("ours", "theirs", "turned"))
    for one in (ours, turned):
        one.add("small", NAME, records[:7])
    theirs.add("small", NAME, records[5:])
    assert ours.merge(theirs.folder) == (5, [])
    assert theirs.merge(turned.folder) == (5, [])
    files = [one.folder / "small" / f"{NAME}.jsonl" for one in (ours, theirs, archive)]
    assert len({file.read_bytes() for file in files}) == 1
    assert ours.merge(theirs.folder) == (0, [])


def test_a_run_with_other_numbers_is_reported_and_ours_is_kept(
    archive: Archive, tmp_path: Path
) -> None:
    one = next(iter(archive.read("small", NAME).values()))
    other = Archive(tmp_path / "other")
    other.add("small", NAME, [one.model_copy(update={"metrics": {"accuracy": 0.0}})])
    mine = Archive(tmp_path / "mine")
    mine.add("small", NAME, [one])
    assert mine.merge(other.folder) == (0, [f"{NAME}: {one.cell}, seed {one.seed}"])
    assert mine.read("small", NAME)[one.digest] == one


def test_infinite_metrics_survive_and_damaged_lines_are_refused(
    archive: Archive, tmp_path: Path
) -> None:
    one = next(iter(archive.read("small", NAME).values()))
    never = one.model_copy(update={"metrics": {"rounds until 60 %": math.inf}})
    mine = Archive(tmp_path)
    mine.add("small", NAME, [never])
    assert mine.read("small", NAME)[one.digest].metrics == {"rounds until 60 %": math.inf}
    file = tmp_path / "small" / f"{NAME}.jsonl"
    for text in ("{", '{"digest": "x"}', one.line.replace('"seed"', '"sead"')):
        file.write_text(f"{never.line}\n{text}\n")
        with pytest.raises(DataError, match="line 2 is not a record of a run of this version"):
            mine.read("small", NAME)
    with pytest.raises(DataError, match="holds no archive"):
        mine.merge(tmp_path / "nothing")
    (tmp_path / "other" / "large").mkdir(parents=True)
    (tmp_path / "other" / "large" / "x.jsonl").write_text(f"{one.line}\n")
    with pytest.raises(DataError, match="unknown scale 'large'"):
        mine.merge(tmp_path / "other")


TABLES = {"one": parsed(TINY, "one")}


def planned(out: Path, tables: Mapping[str, Reproduction] = TABLES) -> Plan:
    return plan(tables, out, "small")


def test_archived_runs_are_not_repeated(tmp_path: Path) -> None:
    first = run_plan(planned(tmp_path), workers=1)
    assert {one.state for one in first.ended} == {"finished"}
    shutil.rmtree(tmp_path / "runs")
    again = planned(tmp_path)
    assert again.finished == {*again.runs}
    done = run_plan(again, workers=1)
    assert not done.ended and done.outcomes == first.outcomes and not (tmp_path / "runs").exists()


def test_equal_runs_of_two_tables_are_archived_for_each_as_its_file_gives_them(
    tmp_path: Path,
) -> None:
    """A table that gives a default finds its runs again alone, too, after a command with both
    tables.
    """
    local = 'run = { method = "local" }'
    assert local in TINY
    explicit = parsed(
        TINY.replace(local, 'run = { method = "local", params = {}, preset = "recommended" }'),
        "two",
    )
    both = {**TABLES, "two": explicit}
    first = planned(tmp_path, both)
    assert len(first.runs) == 8  # one for each of 16 cells and seeds that are equal in pairs
    run_plan(first, workers=1)
    shutil.rmtree(tmp_path / "runs")
    for tables in (both, {"two": explicit}, TABLES):
        again = planned(tmp_path, tables)
        assert again.finished == {*again.runs}
    for name in both:
        for record in Archive(tmp_path / "archive").read("small", name).values():
            assert (record.digest == record.config) == (record.seed == 0)


def test_a_run_is_archived_when_it_ends(tmp_path: Path) -> None:
    """A command that is killed has archived what has finished, as if it had reached its end."""
    sizes = list[int]()

    def progress(standing: Standing) -> None:
        if standing.ended:
            sizes.append(len(Archive(tmp_path / "archive").read("small", "one")))
        if len(sizes) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(planned(tmp_path), workers=1, progress=progress)
    assert sizes == [1, 2, 3]
    (file,) = (tmp_path / "archive").glob("*/*.jsonl")
    killed = {*file.read_text().splitlines()}
    run_plan(planned(tmp_path), workers=1)
    assert killed < {*file.read_text().splitlines()}


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [
        ("10h", 36000),
        ("1.5h", 5400),
        ("45min", 2700),
        ("45m", 2700),
        ("30 s", 30),
        ("0", 0),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_a_budget_is_a_duration(budget: str | float, seconds: float) -> None:
    assert seconds_of(budget) == seconds


@pytest.mark.parametrize("text", ["10", "h", "-1h", "1 day", "1e3s", ""])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget must be a time such as 90s, 45min or 10h"):
        seconds_of(text)


SECOND = """
[[claims]]
text = "FedAL is more accurate than Local at α = 2."
left = "FedAL @ α = 2"
right = "Local @ α = 2"
[small]
"""


def test_a_budget_goes_to_the_most_informative_runs_first(tmp_path: Path) -> None:
    """Two claims of equal information: the cheaper one is first; a claim that cannot be run never
    is.
    """
    tables = {"one": parsed(TINY.replace("[small]\n", SECOND), "one")}
    texts = [batch.claim for batch in batches(planned(tmp_path, tables))]
    assert texts == [
        "one: FedAL is more accurate than Local.",
        "one: FedAL is more accurate than Local at α = 2.",
    ]

    def cost(run: RunConfig) -> float:
        return 1.0 if run.data.options["alpha"] == 2 else 5.0

    told: list[str] = []
    now = iter([0.0, 0.0, *[99.0] * 1000])  # the first batch uses up the budget

    def tell(batch: Batch) -> None:
        told.append(batch.claim)

    spend(
        lambda: planned(tmp_path, tables), 50, cost, workers=1, clock=lambda: next(now), tell=tell
    )
    assert told == ["one: FedAL is more accurate than Local at α = 2."]


def test_a_slow_choice_is_worth_several_batches(tmp_path: Path) -> None:
    tables, told = {"one": parsed(TINY.replace("[small]\n", SECOND), "one")}, list[str]()
    # choosing takes a second, so ten seconds of runs are chosen
    now = iter([0.0, 0.0, 1.0, 2.0, *[99.0] * 1000])

    def tell(batch: Batch) -> None:
        told.append(batch.claim)

    spend(
        lambda: planned(tmp_path, tables),
        50,
        lambda _: 2.0,
        workers=1,
        clock=lambda: next(now),
        tell=tell,
    )
    assert len(told) == 2


@pytest.mark.slow
def test_a_budget_archives_finished_runs_before_the_next_batch(tmp_path: Path) -> None:
    tables, kept = {"one": parsed(TINY.replace("[small]\n", SECOND), "one")}, list[int]()

    def tell(batch: Batch) -> None:
        kept.append(len(Archive(tmp_path / "archive").read("small", "one")))

    spend(
        lambda: planned(tmp_path, tables),
        1e9,
        lambda _: 1e9,
        workers=1,
        stop=lambda: len(kept) > 1,
        tell=tell,
    )
    assert kept[0] == 0 and kept[1] == len([*(tmp_path / "runs").glob("*/result.json")]) > 0


@pytest.mark.slow
def test_a_budget_continues_another_day(tmp_path: Path) -> None:
    """The first day runs the planned seeds; the next one adds seeds, up to the next look, where
    they decide nothing.
    """
    told: list[Batch] = []

    def day() -> list[Ended]:
        begun = len(told)
        return spend(
            lambda: planned(tmp_path),
            3600,
            lambda _: 1.0,
            workers=1,
            stop=lambda: (
                len(told) > begun
                and all((tmp_path / "runs" / k / "result.json").exists() for k in told[-1].runs)
            ),
            tell=told.append,
        )

    assert [one.state for one in day()] == ["finished"] * 4 and {*told[0].runs} < {
        *planned(tmp_path).runs
    }
    (verdict, *_), known = (
        run_plan(planned(tmp_path), execute_runs=False).outcomes[0].claims,
        {*told[0].runs},
    )
    if verdict.verdict == "could not be tested here":
        assert [one.state for one in day()] == ["finished"] * 4 and not known & told[1].runs.keys()
        assert {run.seed for run in told[1].runs.values()} == {2, 3}


def test_a_budget_stops_where_nothing_can_be_decided(tmp_path: Path) -> None:
    never = {
        "one": parsed(
            TINY.replace("[[claims]]", "[[claims]]\nuntestable = { small = 'no' }"), "one"
        )
    }
    assert spend(lambda: planned(tmp_path, never), 3600, lambda _: 1.0, workers=1) == []


@pytest.mark.slow
def test_more_seeds_are_found_and_wait_for_the_next_look(tmp_path: Path) -> None:
    run_plan(planned(tmp_path), workers=1)
    records = Archive(tmp_path / "archive").read("small", "one")
    cell = next(iter(records.values())).cell
    assert {one.seed for one in records.values() if one.cell == cell} == {0, 1}
    more = plan(TABLES, tmp_path, "small", seeds=3)
    run_plan(more, workers=1)
    later = planned(tmp_path)
    assert {len(c.runs) for c in later.planned[0].cells if c.runs} == {3}
    done = run_plan(later, workers=1)
    assert [len(claim.seeds) for claim in done.outcomes[0].claims] == [3, 0]
    assert done.outcomes[0].claims[0].counted in (0, 2)
