"""The notebooks of the documentation run from top to bottom; `make docs` runs them, too, and keeps
their output.
"""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = nbformat.read(notebook, as_version=4)
    assert any(cell.cell_type == "code" for cell in cells.cells)
    nbclient.NotebookClient(
        cells, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()  # an exception in a cell is raised


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_code_is_python(notebook: Path) -> None:
    """Also what a cell writes to a file."""
    nbformat = pytest.importorskip("nbformat")
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            magic, _, code = cell.source.partition("\n")
            compile(code if magic.startswith("%%writefile") else cell.source, notebook.name, "exec")
