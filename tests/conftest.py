from __future__ import annotations

import os
import tempfile

import torch

torch.set_num_threads(1)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fedloom-tests-")  # nothing of a user's own is touched
os.environ.pop("FEDLOOM_DATA", None)
