# `make` alone says what there is. Everything runs in .venv, which every target makes first if it has to.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
TESTS_STAMP := $(VENV)/.set-up-for-tests

# With a GPU: CUDA builds, from the ranges in pyproject.toml. Without: the CPU builds, at the versions of requirements-cpu.txt.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH := $(shell sed -n 's/^torch==//p' requirements-cpu.txt)

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast test-all compiled check demo demo-agent clean

help:
	@echo "make setup   make .venv with everything in it (PYTHON=... names a Python, 3.11 or later)"
	@echo "make demo    train a small model on arithmetic with real rollouts; about 10 minutes on 2 cores"
	@echo "make demo-agent   train it to use a calculator over several turns; about 6 minutes on 2 cores"
	@echo "make test    run the tests, of slow variants one a kind"
	@echo "make check   lint, format, types"
	@echo "make test-fast   the short tests that start no process; about a minute"
	@echo "make test-all    all tests, as CI does"
	@echo "make clean   remove what builds and tests leave behind; .venv and runs/ stay"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-cpu.txt
	@test -n "$(PYTHON)" || { echo "error: there is no python3.11 or later on PATH; name one by PYTHON=..." >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; name another by PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	$(BIN)/python -m pip install -q -e ".[vllm,ray,dev]"
else
	@# PyPI has no CPU build of torch. Where pip's own configuration finds one, take it; elsewhere uv knows where they are.
	$(BIN)/python -c "import torch; assert torch.__version__ == '$(TORCH)+cpu'" 2>/dev/null || \
		$(BIN)/python -m pip install -q "torch==$(TORCH)+cpu" 2>/dev/null || \
		{ $(BIN)/python -m pip install -q uv && \
		$(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=cpu "torch==$(TORCH)"; } || \
		{ echo "found no CPU build of torch $(TORCH): taking the larger CUDA build, which runs on a CPU too"; \
		$(BIN)/python -m pip install -q "torch==$(TORCH)"; }
	$(BIN)/python -m pip install -q --no-deps -r requirements-cpu.txt
	$(BIN)/python -m pip install -q --no-deps -e .
endif
	$(BIN)/python -c "import transformers, vllm" >/dev/null
	@touch $@

$(TESTS_STAMP): requirements-tests.txt $(STAMP)
	$(BIN)/python -m pip install -q --no-deps -r requirements-tests.txt
	@touch $@

# Four files of tests at a time, as most wait for processes; one at a time where they share GPUs.
# One thread a process: tests of several ranks share few cores, where waiting threads slow each other down tenfold.
# Compiled once, or each process that they start compiles the package where PYTHONDONTWRITEBYTECODE is set.
# The longest files first (tests/durations.json), in the order of which pytest-xdist gives them out.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(if $(HAS_GPU),,-n 4 --dist loadfile --no-loadscope-reorder)

test: setup compiled
	$(PYTEST) -m "not slow" $(ARGS)

test-fast: setup compiled
	$(PYTEST) $(if $(HAS_GPU),,-n 2) -m "not slow and not processes and not long" $(ARGS)

test-all: setup $(TESTS_STAMP) compiled
	$(PYTEST) $(ARGS)

compiled: setup
	@$(BIN)/python -m compileall -q rlightning callbacks

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/arithmetic/demo.sh

demo-agent: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/calculator/demo.sh

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
