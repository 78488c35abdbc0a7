# Everything starts here, with only python3 and make. Each target sets up what it needs, once.

PYTHON ?= python3
MODEL  ?= smollm2
ARGS   ?=

# The build of torch, as uv names it: auto, cpu, cu130, ... auto selects the CPU build if there is no NVIDIA device.
TORCH_BACKEND ?= $(or $(UV_TORCH_BACKEND),auto)

BIN   := .venv/bin
READY := .venv/ready

# A test process has one thread: more would only wait for the other process. Tests that still use two threads do not
# spin for a core that another process has. Compiled modules are kept, which saves 6 s a run.
ONE_PYTEST := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
# Three processes run the tests (tests/processes.py). The third uses the cores while slow tests wait.
PYTEST := $(ONE_PYTEST) -p no:xdist --processes 3
# Two Ray clusters fit on two cores: each test process has one at a time, and runs all tests of that cluster. The longest
# come first.
RAY_PYTEST := $(ONE_PYTEST) -n 2 --dist loadscope --no-loadscope-reorder tests/ray tests/deploy/ray

.PHONY: setup model demo serve check check-tests check-text test test-long clients wheel lock image debian triton bench clean

# Makes or repairs the environment. The other targets do this only if the environment is missing or out of date. Here mypy
# also fills its cache, which takes 45 s, so that the first `make check` takes no longer than the next ones.
setup:
	$(SET_UP)
	@$(BIN)/mypy --num-workers 2 >/dev/null || true

$(READY): pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*)
	$(SET_UP)

define SET_UP
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Motet needs Python 3.11 or newer: make PYTHON=python3.x")'
@$(PYTHON) tools/set_up.py --torch-backend $(TORCH_BACKEND)
endef

model: $(READY)
	$(BIN)/motet models pull $(MODEL)

demo: $(READY)
	$(BIN)/motet demo $(ARGS)

serve: $(READY)
	$(BIN)/motet serve $(MODEL) $(ARGS)

# The fast gate: format, lint, types, layers, sizes, words, fast tests; property tests draw fewer examples than in `test`,
# and tests with many parameters have fewer cases, as there (tests/thinned.py). The checks of the text, whose tools have
# one thread, run while pytest collects the tests in one process.
FAST := $(ONE_PYTEST) -m "not slow and not real and not gpu and not long and not clients" --hypothesis-profile=quick

check: $(READY)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-tests check-text

check-text: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/layers.py
	$(BIN)/python tools/sizes.py
	$(BIN)/python -m tools.words --max-share 0

check-tests: $(READY)
	$(FAST) -p no:xdist --processes 2

# Also real processes, faults, reference models and the default model's weights. ARGS choose among the tests without
# Ray clusters; with ARGS, tests with Ray clusters do not run.
test: $(READY) model
	$(PYTEST) -m "not ray and not long and not clients" $(ARGS)
	$(if $(ARGS),,$(RAY_PYTEST) -m "ray and not long")

# Every test with all its cases, also those marked `long`, property tests with ten times the examples, and `make debian`.
test-long: $(READY) model
	$(PYTEST) -m "not ray and not clients and not debian" --hypothesis-profile=long --timeout=1200 $(ARGS)
	$(if $(ARGS),,$(RAY_PYTEST) -m ray)
	$(if $(ARGS),,$(MAKE) --no-print-directory debian)

# Clients of others, each in an environment of its own that is made once and kept in the cache folder (6 GB); needs a
# network then, and npm for three of them.
clients: $(READY) model
	$(BIN)/pytest -q -m clients tests/clients $(ARGS)

# What users install: the source archive and the wheel in dist, tried in an environment without a compiler.
wheel: $(READY)
	$(BIN)/python tools/wheel.py
	$(ONE_PYTEST) tests/packages/test_wheel.py --wheel "$$(ls -t dist/motet-*.whl | head -n 1)" $(ARGS)

# The newest versions and their hashes for the packages in the image, for its Python and its system. ARGS replaces PyTorch's index, for
# example by a folder with torch's CPU-only build: `make lock ARGS="--find-links FOLDER"`.
LOCK := $(BIN)/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
	--only-binary :all: --generate-hashes --upgrade --custom-compile-command "make lock" --output-file deploy/docker

lock: $(READY)
	$(LOCK)/requirements.lock pyproject.toml --extra otel $(or $(ARGS),--torch-backend cpu)
	printf 'build\nsetuptools>=77\n' | $(LOCK)/build.lock -

# Every line of the Dockerfile, carried out without a container engine; needs root, and debootstrap of Debian. 3 minutes.
image: $(READY)
	$(ONE_PYTEST) -m image tests/packages/test_dockerfile.py $(ARGS)

# `make demo` and `make test` on new Debians with other versions of Python, and a server on an emulated Debian for aarch64;
# needs root, debootstrap and qemu-user-static. `make test-long`, and so every release, includes it. CI does not, because
# it takes half an hour.
debian: $(READY)
	$(ONE_PYTEST) -m debian tests/packages $(ARGS)

# The GPU's kernels without a GPU: in Triton's interpreter, and compiled for an H100. Not in `test`: it fetches 290 MB.
triton: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[triton]"
	TRITON_INTERPRET=1 $(PYTEST) -m gpu tests/engines/native/cuda $(ARGS)
	$(PYTEST) -m gpu tests/engines/native/cuda $(ARGS)

bench: $(READY) model
	$(BIN)/python -m bench.fork $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out build dist
