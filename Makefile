# `make demo` and `make test` need Python 3.11 or newer and make, and install all else.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Python compiles the modules that it imports: a tenth of those that are installed.
INSTALL := -m pip install --quiet --no-compile
SOURCES := sparsejax tests conftest.py

.PHONY: demo test test-every pytest lint format docs gpu-check gpu-test clean

# `make demo RECIPE=all` compares all recipes.
RECIPE ?= dense,exdyna,micro

demo: $(READY)  ## Trains on digits with each recipe; prints one table.
	$(BIN)/python -m sparsejax.examples.digits --recipe $(RECIPE) --seeds 5

test: lint pytest  ## Some rows of each test: CONTRIBUTING.md explains which.

test-every: ROWS := --rows every
test-every: test  ## Every row. CI runs a sixteenth of the rows that `make test` omits.

pytest: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder \
		--durations=10 $(ROWS) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(READY)  ## Builds the pages in build/site.
	$(BIN)/python -m mkdocs build --strict

# The compiler for GPUs needs no GPU. It belongs to an environment of its own, since jax
# would look for a device wherever the plugin is installed.
GPU := .venv-gpu

gpu-check: $(GPU)/.ready  ## Compiles every recipe for eight H100, and prints one table.
	JAX_PLATFORMS=cpu $(GPU)/bin/python -m sparsejax.bench.gpu_check $(GPU_ARGS)

# No cache: programs for a device that is not here could not be read from it.
gpu-test: $(GPU)/.ready  ## Tests the bounds of programs for GPUs.
	JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=false $(GPU)/bin/python -m pytest \
		-n $(JOBS) -q tests/test_gpu_check.py $(ROWS)

$(GPU)/.ready: pyproject.toml
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(INSTALL) --editable '.[examples,gpu-check]'
	touch $@

# Installed again whenever the requirements change.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[tests,notebooks]'
	touch $@

clean:
	rm -rf $(VENV) $(GPU) build dist *.egg-info .jax_cache .pytest_cache .ruff_cache .mypy_cache
