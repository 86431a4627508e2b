"""`predict.py` of an exported folder, called within the process of a test.

A process of its own would import PyTorch for two seconds each time;
`test_a_folder_needs_no_fedloom` starts one.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest


def predict(folder: Path, rows: Path) -> str:
    """What it prints, where importing fedloom raises ImportError.

    Raises:
        SystemExit: with the message that it ends with.
    """
    out = TextIOWrapper(BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.delitem(sys.modules, "network", raising=False)
        patch.setitem(sys.modules, "fedloom", None)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(sys, "argv", ["predict.py", str(rows)])
        try:
            runpy.run_path(str(folder / "predict.py"), run_name="__main__")
        finally:
            sys.modules.pop("network", None)
    out.seek(0)
    return out.read()
