# Two commands set everything up: `make demo` and `make test`. Each starts in seconds the second time.
#
#   make demo       train a small model from scratch on this machine and watch it learn
#   make test       the quick tests
#   make check      lint, formatting, types, architecture
#   make bench      the benchmarks, as JSON lines
#   make format     let ruff mend what it can
#   make web        build the dashboard's page from rill/dashboard/web (needs Node; the built page is checked in)
#   make test-slow  every test, slow ones included        make test-gpu  those that need a CUDA device
#   make clean      remove what was built (runs/ is kept)
#
# PYTHON=python3.12 picks another interpreter; ARGS="..." is passed on to pytest or to the demo; JOBS=1 runs one test at a
# time (else as many as there are cores).
# PIP_ARGS="..." is passed to pip: on a machine without a GPU, point it at PyTorch's index of CPU builds
# (--extra-index-url) to spare the CUDA libraries.

VENV     := .venv
BIN      := $(VENV)/bin
PIP_ARGS ?=
ARGS     ?=
JOBS     ?= auto
PYTHON   ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
              $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
              && { echo $$python; break; }; done)
INPUTS   := pyproject.toml constraints.txt
PARALLEL  = $(BIN)/python -m pytest -q -n $(JOBS) --maxprocesses 8 --dist worksteal
# What is never imported need not be compiled: that spares a minute and more.
INSTALL   = $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# A stamp carries the checksum of what it was installed from, so a checkout of another commit is noticed and a
# mere change of file times is not.
SUM      := $(shell cat $(INPUTS) | cksum | tr -d ' ')
CORE     := $(VENV)/.installed-core-$(SUM)
DEV      := $(VENV)/.installed-dev-$(SUM)

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# What is imported is compiled once, not in each of hundreds of processes, whatever a container's image prefers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo installed test test-slow test-gpu check format bench web clean
.DEFAULT_GOAL := test

demo: $(CORE)
	@$(BIN)/rill train demo $(ARGS)

installed: $(DEV)

test: $(DEV)
	@$(PARALLEL) $(ARGS)

test-slow: $(DEV)
	@$(PARALLEL) -m "not gpu" --timeout 900 $(ARGS)

test-gpu: $(DEV)
	@$(BIN)/python -m pytest -q -m "gpu" --timeout 900 $(ARGS)

check: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cd benchmarks && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache --disable-error-code no-any-return --disable-error-code no-untyped-call *.py
	@$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(DEV)
	@for file in $$(grep -l __main__ benchmarks/*.py); do \
	  echo "== $$file" >&2; $(BIN)/python $$file $(ARGS) || exit 1; done

web:
	@command -v npm >/dev/null || { echo "building the page needs Node 20 or newer with npm; using rill does not" >&2; exit 2; }
	@cd rill/dashboard/web && npm ci --ignore-scripts --no-audit --no-fund && npm run check && npm run build

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info rill/dashboard/web/node_modules
	find rill tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "rill needs Python 3.11 or newer with the venv module: install it (Debian: \
	apt install python3.11 python3.11-venv) or say which: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "creating $(VENV) with $(PYTHON)" >&2
	@$(PYTHON) -m venv $(VENV)

$(CORE): | $(BIN)/python
	@echo "installing rill (the first time takes some minutes)" >&2
	@$(INSTALL) -e .
	@rm -f $(VENV)/.installed-core-* && touch $@

$(DEV): | $(BIN)/python
	@echo "installing rill with its development tools (the first time takes some minutes)" >&2
	@$(INSTALL) -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@ $(CORE)
