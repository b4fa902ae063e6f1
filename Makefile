# Each target makes the virtual environment it needs; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Ranks are processes that share the cores: one thread each.
export OMP_NUM_THREADS ?= 1

.PHONY: help run test exactness format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(STAMP) ## plan an attention, run it over local processes, check it against dense attention
	$(BIN)/ultraattn run

test: $(STAMP) ## lint, format check, types, tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

exactness: $(STAMP) ## the whole matrix of masks, layouts, ranks, lengths, heads and dtypes; resumable
	$(BIN)/python -m tests.exactness

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
