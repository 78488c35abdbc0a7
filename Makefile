# Everything starts here, from nothing but python3 and make. Each target sets up what it needs; what is done costs nothing.

PYTHON ?= python3
MODEL  ?= smollm2
ARGS   ?=

BIN   := .venv/bin
READY := .venv/ready
# The one pin of pyproject.toml that must be installed first: see there why it is exact.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

# One thread for each of two workers: more would only wait for each other. Each begins with a half of the tests, so that
# what a module shares is made once, and takes from the other when it has done. Test modules stay compiled: 6 s a run.
# Tests that use two threads all the same do not spin for a core that another process has.
PYTEST := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 2 --dist worksteal
# Ray clusters, of which two have room on two cores: each worker has one at a time, and all its tests. Those that take
# longest come first.
RAY_PYTEST := $(PYTEST) --dist loadscope --no-loadscope-reorder tests/ray tests/deploy/ray

.PHONY: setup model demo serve check check-text check-tests test test-long triton bench clean

setup: $(READY)

$(READY): pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Motet needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

model: $(READY)
	$(BIN)/motet models pull $(MODEL)

demo: $(READY)
	$(BIN)/motet demo $(ARGS)

serve: $(READY)
	$(BIN)/motet serve $(MODEL) $(ARGS)

# The fast gate: format, lint, types, layers, sizes, fast tests; property tests draw fewer examples than in `test`.
# What looks at the text runs beside the tests: each of its tools has one thread.
check: $(READY)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-tests check-text

check-text: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/layers.py
	$(BIN)/python tools/sizes.py

check-tests: $(READY)
	$(PYTEST) -m "not slow and not real and not gpu and not long" --hypothesis-profile=quick $(ARGS)

# Real processes, faults, reference models and the default model's weights too. ARGS choose among the tests without
# Ray clusters; those with come only where there are none.
test: $(READY) model
	$(PYTEST) -m "not ray and not long" $(ARGS)
	$(if $(ARGS),,$(RAY_PYTEST) -m "ray and not long")

# Every test, also where a few of a kind prove nearly as much, and property tests with ten times the examples.
test-long: $(READY) model
	$(PYTEST) -m "not ray" --hypothesis-profile=long --timeout=1200 $(ARGS)
	$(if $(ARGS),,$(RAY_PYTEST) -m ray)

# The GPU's kernels without a GPU: in Triton's interpreter, and compiled for an H100. 290 MB more, so no part of `test`.
triton: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[triton]"
	TRITON_INTERPRET=1 $(PYTEST) -m gpu tests/engines/native/cuda $(ARGS)
	$(PYTEST) -m gpu tests/engines/native/cuda $(ARGS)

bench: $(READY) model
	$(BIN)/python -m bench.fork $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out
