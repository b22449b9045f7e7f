# Two commands do everything on a machine with Python 3.11 (venv, pip), git and make:
#   make compare   set up and run the main job
#   make test      set up and run all checks and tests

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install compare test check unit slow benchmark format clean

compare: $(STAMP)
	$(BIN)/python -m polymode compare

test: check unit

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,all]'
	touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow'

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

benchmark: $(STAMP)
	$(BIN)/python benchmarks/run.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
