# Everything a newcomer needs: `make demo` and `make test`. Both build the environment first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for installing torch alone, for instance the index of a CPU or CUDA build (see README).
TORCH_ARGS ?=

.PHONY: demo test lint setup

demo: setup
	$(BIN)/hisparse demo

test: setup
	$(BIN)/python -m pytest

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
