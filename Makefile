# Each target sets up all it needs, and does nothing that is done already.
#   make demo        generate text with the bundled model
#   make test        lint, then the tests that CI runs
#   make test-full   lint, then all tests, the long matrices too
# PYTHON chooses the interpreter; CMAKE_ARGS reaches the build of llama.cpp as it is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Everything is set up by the time the tests run: a native test that cannot be built fails instead of being skipped.
export MOESPAC_REQUIRE_NATIVE := 1

.PHONY: setup llama stock demo test test-full lint clean

setup: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The script knows best whether anything changed; asking it takes a fraction of a second.
llama: $(BIN)/python
	@$(BIN)/python scripts/build_llama.py

# After the patched llama-cpp-python, or pip would fetch and build the unpatched one.
$(VENV)/.installed: pyproject.toml | llama
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@

# Upstream unpatched, with the same flags, in an environment of its own: what parity is measured against.
stock: $(BIN)/python
	@$(BIN)/python scripts/build_llama.py --stock --venv build/stock/venv

demo: setup
	$(BIN)/moespac demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Hybrid layers can be executed in two ways; on a CPU the portable one is the default, and these run in the other one too.
EITHER := tests/test_parity.py tests/test_observe.py tests/test_graphs.py tests/test_moves.py tests/test_errors.py

test: lint stock
	$(BIN)/python -m pytest -m "not full"
	MOESPAC_TEST_EXECUTION=in-stream $(BIN)/python -m pytest -q -m "not full" $(EITHER)

test-full: lint stock
	$(BIN)/python -m pytest
	MOESPAC_TEST_EXECUTION=in-stream $(BIN)/python -m pytest -q $(EITHER)

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache
