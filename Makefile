# Two commands do all: `make demo` and `make test`. Both install what they need into .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test check up bench compiled lock generate clean

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## Run the main job for about a minute, with everything embedded
	$(BIN)/evenhand demo $(ARGS)

up: $(VENV)/.demo  ## Start the stack for your own engines: make up ARGS="--worker http://... --kv-events tcp://..."
	$(BIN)/evenhand up $(ARGS)

test: $(VENV)/.dev  ## Run the tests
	$(BIN)/python -m pytest -m "not real_engine and not benchmark" $(ARGS)

check: $(VENV)/.dev  ## Lint, types, layers, schemas, drift
	bash .ci/check $(BIN)

bench: $(VENV)/.dev  ## Print every figure of docs/benchmarks.md; about ten minutes on an idle machine
	for name in fold translator core_scheduler acquire warm_start visibility state engine; do \
	  echo "== bench_$$name"; PYTHONPATH=services:. $(BIN)/python -m tests.benchmarks.bench_$$name || echo "bench_$$name: missed"; \
	done

compiled: $(VENV)/.dev  ## Install the package with a compiled core into build/compiled; needs a C compiler
	rm -rf build/compiled
	HATCH_BUILD_HOOKS_ENABLE=1 $(PIP) install --no-deps --target build/compiled .
	PYTHONPATH=build/compiled $(BIN)/python -m evenhand.cli --version

lock: $(VENV)/.dev  ## Lock the dependencies again, with hashes and without naming an index
	$(PIP) install uv
	for pair in server:requirements-server.txt embedded:requirements.txt dev:requirements-dev.txt; do \
	  $(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --no-header \
	    --generate-hashes --no-emit-index-url --extra $${pair%%:*} -o $${pair##*:}; \
	done

generate: $(VENV)/.dev  ## Generate the wire code from the schemas
	$(BIN)/python schemas/generate.py

clean:  ## Remove what was installed and cached here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis evenhand-demo.png

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Evenhand needs Python 3.11 or later; say which with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements.txt pyproject.toml | $(BIN)/python
	$(PIP) install --require-hashes -r requirements.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements-dev.txt pyproject.toml | $(BIN)/python
	$(PIP) install --require-hashes -r requirements-dev.txt
	$(PIP) install --no-deps -e .
	@touch $@ $(VENV)/.demo
