# `make demo` and `make test` set everything up; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
PIP_FLAGS ?=
STAMP := $(VENV)/.installed

.PHONY: demo test check setup clean

demo: $(STAMP)
	$(BIN)/samebit train recipes/demo.toml

test: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest

setup: $(STAMP)

check: $(STAMP)
	$(BIN)/samebit check

# torch first, by exact version: asked for through a range, pip may pick a build of several GB
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build dist
