# Every target makes what it needs: a machine with python3 (and its venv module), make and gcc is enough.

PYTHON ?= python3
MINUTES ?= 5
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSERS := chromium chromium-browser google-chrome chrome
# One thread a worker: two workers with two threads each would fight for two cores. Triton decides at its import whether it
# interprets kernels, so the whole run does.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TRITON_INTERPRET=1

.DEFAULT_GOAL := help
.PHONY: help setup demo chromium test check fuzz bench docs figures test-gpu bench-gpu compile-gate clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the tested versions (again when pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## train a pair of small models, with and without StableMask, and compare them
	$(BIN)/python -m stablemask.cli demo

chromium:  ## find a browser for the tests of pages, or install Debian's (as root)
	@for name in $(BROWSERS); do command -v $$name && exit 0; done; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get -qq -o Acquire::Retries=3 update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=3 install --no-install-recommends chromium; \
	else \
		echo "no browser: none of $(BROWSERS) is found. Debian, as root: make chromium." \
			"Elsewhere: install Chromium or Chrome under one of these names, or go without: its tests are skipped." >&2; \
		exit 1; \
	fi

test: $(STAMP)  ## run every test that needs no GPU
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 2 --ignore=tests/gpu $(PYTEST_ARGS)

check: $(STAMP)  ## lint, formatting, types and a strict build of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

docs: $(STAMP)  ## build the documentation into site/, warnings being errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

figures: $(STAMP)  ## draw the pictures of the documentation again
	$(BIN)/python docs/figures/make.py

fuzz: $(STAMP)  ## random calls against the oracle for MINUTES=5
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

bench: $(STAMP)  ## time the back ends against plain causal attention
	$(BIN)/python -m benchmarks.attention

compile-gate: $(STAMP)  ## compile the Triton kernels for GPUs ahead of time: no spills, matrix instructions
	env -u TRITON_INTERPRET $(BIN)/python -m benchmarks.compile_gate

# Installs nothing and reads no pytest settings: a GPU machine brings its own torch and perhaps none of our plugins.
test-gpu:  ## run the GPU tests with PYTHON=python3 as it is, nothing installed
	env -u TRITON_INTERPRET PYTHONPATH=src:. $(PYTHON) -m pytest -c /dev/null --rootdir . -p no:cacheprovider \
		--import-mode=importlib -ra $(PYTEST_ARGS) tests/gpu

bench-gpu:  ## time the back ends on a GPU with PYTHON=python3 as it is, nothing installed
	env -u TRITON_INTERPRET PYTHONPATH=src:. $(PYTHON) -m benchmarks.cuda

clean:  ## remove everything that is built here
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
