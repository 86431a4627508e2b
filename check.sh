#!/usr/bin/env bash
# Everything that must hold before a change lands; the same here and in CI. `make test` calls it.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1

ruff format --check .
ruff check .
mypy
python -m pytest "$@"

# The wheel holds what an installation needs beside the code.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python -m build --wheel --no-isolation -o "$wheels" . >/dev/null
for file in experiments/quickstart.toml report/page.html py.typed; do
  python -m zipfile -l "$wheels"/*.whl | grep -q "fedloom/$file" || { echo "the wheel lacks $file"; exit 1; }
done
