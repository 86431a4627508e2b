# `make demo` and `make test` need Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV ?= .venv
# On Linux the registry's torch brings CUDA (gigabytes). To take another build, name its index:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -q
INDEX = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test quick wheel bench docs build clean help

help: ## show this
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(VENV)/.core ## learn together on scikit-learn's digits: FedAL, FedMD and Local
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/fedloom run quickstart

test: $(VENV)/.dev ## format, lint, types and tests; SLOW=1 for the slow ones, too
	PATH="$(abspath $(VENV))/bin:$$PATH" ./check.sh

# A page's tests are those that have its name, or that of one of its methods, in theirs.
CHANGED = $(shell git diff --name-only HEAD -- src/fedloom/methods | xargs -rn1 basename -s .py)
METHOD ?= $(CHANGED)
quick: $(VENV)/.dev ## format, lint and tests of the pages that you changed, or of one: make quick METHOD=fedal
	@test -n "$(strip $(METHOD))" || { echo "No page has changed since the last commit. Name one: make quick METHOD=fedal"; exit 1; }
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check .
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --durations=3 tests/test_architecture.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --durations=3 tests/methods tests/engines/test_every_method.py \
	  -k "$$(echo $(METHOD) | sed 's/ / or /g')"

bench: $(VENV)/.core ## CPU seconds against plain PyTorch
	$(VENV)/bin/python -m benchmarks

docs: $(VENV)/.dev ## the documentation site, in build/site, and that of the papers' results
	$(VENV)/bin/python -m sphinx -q -W --keep-going docs build/site
	$(VENV)/bin/python -m sphinx -q -W --keep-going papers/docs build/site/papers
	@echo "Open build/site/index.html and build/site/papers/index.html"

build: $(VENV)/.dev ## the sdist, the wheel that is built from it, and the papers' wheel
	$(VENV)/bin/python -c 'from fedloom.cli.listing import write_index; write_index()'
	$(VENV)/bin/python -m build -o dist .
	rm src/fedloom/cli/listing.json
	$(VENV)/bin/python -m build --wheel -o dist papers

wheel: ## the tests on the wheels in dist, in an environment without this checkout's code
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install -q --no-compile -c constraints.txt $(INDEX) \
	  $$(ls dist/fedloom-*.whl) "$$(ls dist/fedloom-*.whl)[dev]" $$(ls dist/fedloom_papers-*.whl)
	build/wheel/bin/python -c 'import fedloom, sys; sys.exit(fedloom.__file__.startswith(f"{sys.prefix}/") is False)'
	PATH="$(abspath build/wheel/bin):$$PATH" OMP_NUM_THREADS=1 python -m pytest -n 4 --dist worksteal $(TESTS)

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedloom needs Python 3.11 or newer: make demo PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "This Python can't make virtual environments: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip would compile every file of torch for half a minute: without it, Python compiles what is imported, and keeps that.
$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once)..."
	$(PIP) install --no-compile -c constraints.txt $(INDEX) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml papers/pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once)..."
	$(PIP) install --no-compile -c constraints.txt $(INDEX) -e ".[dev]" -e papers
	@touch $@ $(VENV)/.core
