"""The script of a report in a browser: tables are sorted and filtered, and figures show values
under the pointer.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedloom import report
from tests.report.test_report import write_comparison

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")


def opened(text: str, folder: Path) -> str:
    """The document that a page becomes in a browser."""
    assert BROWSER is not None
    (folder / "opened.html").write_text(text, encoding="utf-8")
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    url = (folder / "opened.html").as_uri()
    return subprocess.run(
        [*command, url], capture_output=True, text=True, timeout=120, check=True
    ).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compared")
    accuracies = {"fedal": (0.5, 0.6), "local": (0.25, 0.5), "fedmd": (0.625, 0.75)}
    return report.write(write_comparison(folder, accuracies)).read_text(encoding="utf-8")


def acted(page: str, action: str, folder: Path) -> str:
    """The page after an action, which its policy would refuse."""
    free = re.sub(r"<meta http-equiv[^>]*>", "", page)
    return opened(free.replace("</body>", f"<script>{action}</script></body>"), folder)


def names(dom: str) -> list[str]:
    """The methods in the first table that are shown, in order."""
    body = dom.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [
        row
        for row in re.findall(r"<tr[^>]*>.*?</th>", body, re.S)
        if not row.startswith("<tr hidden")
    ]
    return [re.sub(r"<[^>]+>", "", row).strip() for row in rows]


def test_its_policy_lets_the_script_run(page: str, tmp_path: Path) -> None:
    dom = opened(page, tmp_path)
    assert dom.count("<button>") > 10 and 'data-label="Accuracy"' in dom
    assert names(dom) == ["fedal", "local", "fedmd"]


def test_a_click_on_a_heading_sorts_and_a_third_restores(page: str, tmp_path: Path) -> None:
    click = "document.querySelectorAll('table')[0].tHead.rows[0].cells[1].firstChild.click();"
    assert names(acted(page, click, tmp_path)) == ["fedmd", "fedal", "local"]
    assert names(acted(page, 2 * click, tmp_path)) == ["local", "fedal", "fedmd"]
    assert names(acted(page, 3 * click, tmp_path)) == ["fedal", "local", "fedmd"]


def test_numbers_are_compared_with_their_units(page: str, tmp_path: Path) -> None:
    """1.5 MB is more than 20 kB, and 2 min more than 80 s."""
    table = "document.querySelectorAll('table')[0]"
    texts = ["20.0 kB", "1.50 MB", "\u2212"]
    fill = "".join(
        f"{table}.tBodies[0].rows[{i}].cells[4].textContent = {text!r};"
        for i, text in enumerate(texts)
    )
    click = f"{table}.tHead.rows[0].cells[4].firstChild.click();"
    assert names(acted(page, fill + click, tmp_path)) == ["local", "fedal", "fedmd"]
    fill = fill.replace("20.0 kB", "80.0 s").replace("1.50 MB", "2 min 1 s")
    assert names(acted(page, fill + click, tmp_path)) == ["local", "fedal", "fedmd"]


def test_the_pointer_shows_the_values_of_a_figure(page: str, tmp_path: Path) -> None:
    move = (
        "const svg = document.querySelector('svg[data-hover]'), box = "
        "svg.getBoundingClientRect();svg.dispatchEvent(new PointerEvent('pointermove', {clientX: "
        "box.right - 30, clientY: box.top + 40}));"
    )
    tip = re.search(r'<div class="tip"[^>]*>(.*?)</div></div>', acted(page, move, tmp_path), re.S)
    assert tip is not None
    text = re.sub(r"<[^>]+>", " ", tip[1]).replace("&nbsp;", " ").replace("\xa0", " ")
    assert (
        " ".join(text.split())
        == "10 iterations of a client fedal: 55.0 % local: 37.5 % fedmd: 68.8 %"
    )


def test_long_tables_have_a_filter(page: str, tmp_path: Path) -> None:
    assert "<input" not in page
    more = "".join(f"<tr><th scope=row>method {n}</th>{'<td></td>' * 8}</tr>" for n in range(10))
    long = page.replace("</tbody>", more + "</tbody>", 1)
    act = "const field = document.querySelector('input[type=search]'); field.value = 'method 3';"
    assert names(acted(long, act + "field.dispatchEvent(new Event('input'));", tmp_path)) == [
        "method 3"
    ]
