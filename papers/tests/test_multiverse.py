"""Maps of where a claim holds: cells, signs, and the picture."""

from papers.tests.conftest import Made

from fedloom.report.metrics import RunMetric
from fedloom_papers.multiverse import Map, MapCell, counted, draw, maps
from fedloom_papers.results import gather
from fedloom_papers.shipped import shipped
from fedloom_papers.spec import Multiverse, read


def test_each_cell_is_a_paired_difference_with_its_own_interval(made: Made) -> None:
    rows = [row.name for row in made.reproduction.rows]
    spec = Multiverse(
        text="A is better.",
        pairs=((rows[0], rows[1]), (rows[1], rows[0])),
        metrics={"": "accuracy"},
    )
    table = made.reproduction.model_copy(update={"multiverse": (spec,)})
    found = gather("t", table, "small", made.cells, made.folder, {})
    (one,) = maps(found)
    assert len(one.rows) == 2 and len(one.columns) == len(found.columns)
    for column, (there, back) in enumerate(zip(*one.cells, strict=True)):
        name = found.columns[column]
        left, right = (
            found.number(row, name, RunMetric.parse("accuracy"), "%").mean or 0 for row in rows[:2]
        )
        assert there is not None and back is not None
        assert abs(there.mean - (left - right)) < 1e-9 and abs(there.mean + back.mean) < 1e-9
        assert there.low <= there.mean <= there.high and there.seeds == 3
    missing = spec.model_copy(update={"metrics": {"": "no such metric"}})
    assert (
        maps(
            gather(
                "t",
                table.model_copy(update={"multiverse": (missing,)}),
                "small",
                made.cells,
                made.folder,
                {},
            )
        )
        == ()
    )


def test_the_picture_has_a_number_for_each_cell() -> None:
    cells = (
        MapCell(2.0, 1.0, 3.0, 5),
        MapCell(-2.0, -3.0, -1.0, 5),
        MapCell(0.5, -1.0, 2.0, 5),
        None,
    )
    assert [cell.word for cell in cells if cell] == ["holds", "fails", "open"]
    one = Map("Table I: A", ("a", "b", "c", "d"), ("A − B",), (cells,))
    svg, keys = draw("test", [one, one])
    assert svg.count("+2.0</text>") >= 2 and "0.5" in svg and len(keys) == 3
    assert (
        "Of six combinations the claimed direction holds in 2, fails in 2 and is open in 2"
        in counted([one, one])
    )


def test_each_paper_has_a_map() -> None:
    assert {read(name).system for name in shipped() if read(name).multiverse} == {
        "fedal",
        "afind",
        "evfl",
        "augfl",
    }
