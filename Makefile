# Two commands matter: `make demo` and `make test`. Each builds .venv first, with whatever Python 3.11+ is called PYTHON.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test test-slow test-lowest lint bench docs clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# said before .venv is made, which would keep the Python it was made with
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")

# torch goes first and pinned, so that nothing after it asks for another build of it
$(STAMP): requirements/torch.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(STAMP)
	$(BIN)/eigengrain demo

test: $(STAMP) lint
	$(BIN)/pytest -n auto -m "not slow" src tests

test-slow: $(STAMP)
	$(BIN)/pytest -n auto -m slow tests

# with the lowest versions that pyproject.toml allows, in an environment of its own
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/pytest -n auto -m "not slow" src tests

.venv-lowest/.installed: requirements/lowest.txt pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -r requirements/lowest.txt pytest pytest-xdist hypothesis
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/eigengrain bench functional

# the pages, in site/index.html; a warning is an error. All of them are made anew (-E -a): what a page takes from the package, such
# as the help of the commands, may have changed where its own file has not
docs: $(VENV)/.docs-installed
	$(BIN)/sphinx-build -q -W --keep-going -E -a -b html docs site
	@rm -rf jupyter_execute  # where the notebooks' pictures were before they came to site/
	@echo "site/index.html"

$(VENV)/.docs-installed: $(STAMP) requirements/docs.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest build dist site .pytest_cache .mypy_cache .ruff_cache runs
