# `make demo` and `make test` set everything up; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# the kernels are proved with the triton that torch 2.11 brings
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),2.11.0,2.13.0)
TRITON ?= 3.6.0
PIP_FLAGS ?=
STAMP := $(VENV)/.installed
OUTSIDE := .venv-outside
OUTSIDE_STAMP := $(OUTSIDE)/.installed

.PHONY: demo test test-outside test-kernels check setup clean

# again: goes on from its checkpoint, says that nothing is left to do, or starts anew where there is none
demo: $(STAMP)
	$(BIN)/samebit train recipes/demo.toml $(if $(wildcard runs/demo/metrics.jsonl),--resume)

test: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest

# an environment of its own: verl's pins are not ours, and `make test` installs nothing of it
test-outside: $(OUTSIDE_STAMP)
	$(OUTSIDE)/bin/python -m pytest -m outside tests/rl/outside

# every tile and head shape that is shipped, compiled for Hopper without one: minutes
test-kernels: $(STAMP)
	$(BIN)/python -m pytest -m whole tests/kernels/test_compiled.py

setup: $(STAMP)

check: $(STAMP)
	$(BIN)/samebit check

# torch first, by exact version: asked for through a range, pip may pick a build of several GB.
# Its CUDA builds bring the triton they were made with, its CPU builds none: the kernels' tests need one
# (its interpreter runs them, its compiler builds them for Hopper, both without a GPU).
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --editable . --group dev
	test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet triton==$(TRITON)
	touch $(STAMP)

$(OUTSIDE_STAMP): tests/rl/outside/requirements.txt
	test -x $(OUTSIDE)/bin/python || $(PYTHON) -m venv $(OUTSIDE)
	$(OUTSIDE)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(OUTSIDE)/bin/python -m pip install --quiet $(PIP_FLAGS) torch==$(TORCH)
	$(OUTSIDE)/bin/python -m pip install --quiet -r tests/rl/outside/requirements.txt
	$(OUTSIDE)/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $(OUTSIDE_STAMP)

clean:
	rm -rf $(VENV) $(OUTSIDE) runs build dist
