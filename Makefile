# make demo   train on a real grocery log and recommend products by title (some four minutes on two cores)
# make test   run the tests
# make lint   check style
# make bench  what retrieval, training, trie and SIDs cost (some ten minutes)
# Each sets up .venv first, and again only when setup.cfg or this file changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench setup clean

setup: $(READY)

# torch is pinned, and first, so that a CPU build of that version where pip finds one serves all that depends on it.
$(READY): setup.cfg pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/hf-deco demo --output-dir runs/demo

# One thread a worker: workers that share cores between many threads wait for each other.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check src recipes tests
	$(BIN)/ruff format --check src recipes tests

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python recipes/benchmark.py --quick
	OMP_NUM_THREADS=1 $(BIN)/python recipes/benchmark_training.py
	$(BIN)/python recipes/benchmark_trie.py
	$(BIN)/python recipes/benchmark_sids.py

clean:
	rm -rf .venv build dist src/*.egg-info
