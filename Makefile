# Two commands do everything on a machine with Python 3.11 or later (venv, pip), git and make:
#   make compare   set up and run the main job
#   make test      set up and run all checks and tests
# The first Python of PYTHONS that is recent enough and has venv is taken; make PYTHON=... names another one.

PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python
FITS := -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" 2> /dev/null
PYTHON ?= $(shell for name in $(PYTHONS); do $$name $(FITS) && echo $$name && break; done; true)
FOUND = $(shell for name in $(PYTHON) $(PYTHONS); do \
	version=$$($$name --version 2>&1) && echo "$$name is $$version,"; done; true)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -m 'not slow'
CONTRACT_TESTS := tests/contract tests/faults tests/properties tests/training
CAN_INSTALL = $(shell { test -x $(BIN)/python || $(PYTHON) $(FITS); } && echo yes; true)

.PHONY: install compare test check library contract application faults slow portable portable-subset benchmark docs format clean

compare: $(STAMP)
	$(BIN)/python -m polymode compare

test: library contract application check portable-subset

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(if $(CAN_INSTALL),,$(error polymode needs Python 3.11 or later with venv (a package of its own on Debian \
	and Ubuntu: python3-venv); found: $(or $(FOUND),none of $(PYTHONS),) \
	so install one or name another: make PYTHON=/path/to/python3))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,all]'
	touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

# In three, so that `make --jobs=2 test` keeps two cores busy.
library: $(STAMP)
	$(PYTEST) --ignore=tests/application $(addprefix --ignore=,$(CONTRACT_TESTS))

contract: $(STAMP)
	$(PYTEST) $(CONTRACT_TESTS)

application: $(STAMP)
	$(PYTEST) tests/application

# The tests again as other machines would compute: with the plainest kernels, with MKL's most compatible ones,
# with more threads, and with matrix products that round by their shape (tests/other_kernels.py).
portable: $(STAMP)
	ATEN_CPU_CAPABILITY=default $(PYTEST)
	MKL_CBWR=COMPATIBLE $(PYTEST)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PYTEST)
	OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 $(PYTEST)
	OMP_NUM_THREADS=3 MKL_NUM_THREADS=3 $(PYTEST)
	PYTHONPATH=$(CURDIR)/tests $(PYTEST) -p other_kernels

# Some that other kernels or threads could change, in about two minutes; `make test` runs them.
KERNEL_TESTS := tests/application/comparison/test_compare.py tests/contract/test_sketches.py tests/metrics \
	tests/posteriors/test_component_mixture.py tests/networks/test_members.py tests/networks/test_recording.py \
	tests/own_loop/test_stacked.py tests/training/test_fit.py \
	tests/training/test_precision.py
THREAD_TESTS := tests/metrics tests/networks/test_members.py tests/networks/test_recording.py tests/own_loop/test_stacked.py \
	tests/training/test_precision.py
portable-subset: $(STAMP)
	PYTHONPATH=$(CURDIR)/tests $(PYTEST) -p other_kernels $(KERNEL_TESTS)
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(PYTEST) $(KERNEL_TESTS)
	OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 $(PYTEST) $(THREAD_TESTS)
	OMP_NUM_THREADS=3 MKL_NUM_THREADS=3 $(PYTEST) $(THREAD_TESTS)

# Faults and hostile input at length: hundreds of kills (what was done before is kept in FAULT_RESULTS, and the same
# command goes on), and thousands of examples of each property, drawn anew at every run.
FAULT_RESULTS := faults.jsonl
faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults.campaign $(FAULT_RESULTS) --times 20 --kills 120
	HYPOTHESIS_PROFILE=long $(PYTEST) tests/properties

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

benchmark: $(STAMP)
	$(BIN)/python benchmarks/run.py

docs: $(STAMP)
	$(BIN)/python docs/option_tables.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
