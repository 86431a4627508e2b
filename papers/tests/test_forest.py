"""Forest plots."""

from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from fedloom.report.page import Figure
from fedloom_papers.claims import ClaimResult
from fedloom_papers.forest import can_be_drawn, file_of, forest

ONE = ClaimResult(
    text="A is more <accurate> than B.",
    compared="A − B",
    verdict="reproduced",
    gate="",
    printed=4.0,
    mean=3.0,
    ends=(1.0, 5.0),
    seeds={0: 3.0},
    unit="%",
    found="+3.0 points (+1.0 to +5.0), printed +4.0",
)


class Elements(HTMLParser):
    """The texts of a figure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_each_claim_has_its_text_and_verdict() -> None:
    other = replace(
        ONE,
        text="B is less accurate.",
        rule="less",
        verdict="not reproduced",
        mean=90.0,
        ends=(80.0, 100.0),
    )
    gated = replace(
        ONE,
        text="C is more accurate.",
        verdict="could not be tested here",
        gate="headroom",
        printed=None,
    )
    svg, keys = forest("x", [(ONE, "Table I"), (other, "Table I"), (gated, "Figure 2")])
    texts = " ".join(Elements(str(svg)).texts)
    for words in (
        "Table I: A is more <accurate> than B.",
        "not reproduced",
        "headroom",
        "Figure 2: C is",
    ):
        assert words in texts
    assert [key.text for key in keys] == [
        "reproduced",
        "not reproduced",
        "could not be tested here",
        "the paper's effect",
    ]
    assert forest("x", [(ONE, "Table I"), (other, "Table I"), (gated, "Figure 2")])[0] == svg


@pytest.mark.parametrize("change", [{"unit": "MB"}, {"mean": None}, {"ends": None}])
def test_claims_without_an_interval_in_points_are_not_drawn(change: dict[str, object]) -> None:
    assert can_be_drawn(ONE) and not can_be_drawn(replace(ONE, **change))  # type: ignore[arg-type]


def test_a_file_has_its_legend_above_the_figure() -> None:
    svg, keys = forest("x", [(ONE, "Table I")])
    file = file_of(Figure("Claims", svg, keys))
    left, top, width, height = map(int, ElementTree.fromstring(file).attrib["viewBox"].split())
    inner = [
        int(side)
        for side in ElementTree.fromstring(file_of(Figure("Claims", svg))).attrib["viewBox"].split()
    ]
    assert (left, width) == (0, inner[2]) and top < 0 and height + top == inner[3]
    texts = [text for text in Elements(file).texts if text.strip()]
    assert texts[: len(keys)] == ["reproduced", "the paper's effect"]
    assert "var(--" not in file
