# Everything a newcomer needs: `make demo` and `make test`. Both build the environment first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for installing torch alone, for instance the index of a CPU or CUDA build (see README).
TORCH_ARGS ?=

.PHONY: demo test test-gpu lint setup

demo: setup
	$(BIN)/hisparse demo

test: setup
	$(BIN)/python -m pytest

# On a machine with a GPU: a test that would skip for want of one fails instead.
test-gpu: setup
	HISPARSE_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[serve,bench,dev]'
	touch $@
