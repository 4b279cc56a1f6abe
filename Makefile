# Everything a newcomer needs: `make demo` and `make test`. Both build the environment first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for installing torch alone, for instance the index of a CPU or CUDA build (see README).
TORCH_ARGS ?=

.PHONY: demo test test-gpu test-load sanitize lint setup

demo: setup
	$(BIN)/hisparse demo

test: setup
	$(BIN)/python -m pytest

# On a machine with a GPU: a test that would skip for want of one fails instead.
test-gpu: setup
	HISPARSE_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu

# The long form of tests/server/test_load.py, which `make test` runs for a few seconds: ten minutes unless told otherwise.
LOAD_SECONDS ?= 600
test-load: setup
	HISPARSE_LOAD_SECONDS=$(LOAD_SECONDS) $(BIN)/python -m pytest -s tests/server/test_load.py

# The small cases of the kernels' tests under compute-sanitizer, which comes with the CUDA toolkit.
SMALL := test_random_schedules and lru or several_requests or strided or plan or without_a_page or refilled or bounded
sanitize: setup
	for tool in "memcheck --report-api-errors no" racecheck initcheck; do \
	    PYTORCH_NO_CUDA_MEMORY_CACHING=1 HISPARSE_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m pytest tests/kernels/test_ops_gpu.py -k "$(SMALL)" || exit 1; done

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
