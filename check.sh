#!/usr/bin/env bash
# Everything that must hold before a change lands; the same here and in CI. `make test` calls it.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1

ruff format --check .
ruff check .
mypy
python -m pytest "$@"
