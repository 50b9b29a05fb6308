# The main commands are `make demo` and `make test`. Each creates .venv first, with the Python 3.11+ named by PYTHON.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test test-fast test-slow test-lowest fuzz mutants lint bench study docs clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# checked before .venv is created, which keeps the Python it is created with
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")

# torch is installed first and pinned, so that no later package pulls another build of it
$(STAMP): requirements/torch.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(STAMP)
	$(BIN)/eigengrain demo

# one thread per process: pytest already runs one process per core
test test-fast test-slow: export OMP_NUM_THREADS = 1

test: $(STAMP) lint
	$(BIN)/pytest -n auto --dist loadfile -m "not slow" src studies benchmarks tests

# the core: run it on save
test-fast: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile tests/core

test-slow: $(STAMP)
	$(BIN)/pytest -n auto --dist loadfile -m slow tests

# with the lowest versions that pyproject.toml allows, in an environment of its own
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/pytest -n auto --dist loadfile -m "not slow" src tests

.venv-lowest/.installed: requirements/lowest.txt pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -r requirements/lowest.txt pytest pytest-xdist
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# make fuzz SAMPLES=20000 SEED=1 DEVICE=cuda
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --samples $(or $(SAMPLES),100000) --seed $(or $(SEED),0) --device $(or $(DEVICE),cpu)

# the share of deliberate changes that make a test fail, see tests/mutants.py: make mutants TEXT=kernel
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(TEXT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make bench NAME=heads, make study NAME=gcp-methods
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(or $(NAME),functional)

study: $(STAMP)
	$(BIN)/python -m studies $(or $(NAME),list)

# the documentation site; a warning is an error. All pages are rebuilt (-E -a), because the help of a command can change without a
# change of its page
docs: $(VENV)/.docs-installed
	$(BIN)/sphinx-build -q -W --keep-going -E -a -b html docs site
	@rm -rf jupyter_execute  # temporary figures of the notebooks
	@echo "site/index.html"

$(VENV)/.docs-installed: $(STAMP) requirements/docs.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest build dist site .pytest_cache .mypy_cache .ruff_cache runs
