# Every target installs what it needs: `make demo`, `make test` on a machine with Python 3.11+ and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# setuptools, with which pip builds this package, would draw boxes of warnings that look like a failure.
PIP = PYTHONWARNINGS=ignore $(BIN)/pip
# Before anything is made: an environment of an older Python would be in the way of a newer one.
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), and Swell needs Python 3.11 or later:" \
    "make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
CONFORMANCE := .venv-judges
TRITON := .venv-triton

# Python stores compiled modules even where the environment forbids it: compiling the tests, with rewritten assertions,
# takes each of their processes 10 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-fast test-slow test-random test-loaded simulate scale gpu test-gpu test-triton triton-interpreted triton-compiled judges zoo fault-matrix image bench bench-docs lint typecheck clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(CHECK_PYTHON)
	@echo "setup: a new environment in $(VENV), then its packages (torch, Ray and others, some 2 GB): minutes"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip setuptools
	$(PIP) install --editable '.[test]'
	touch $(STAMP)

demo: setup
	$(BIN)/python -m swell.cluster.cli.demo

# In four processes of up to 2 GB and one cluster of up to 6 GB: one begins with the tests that start Ray, which often
# wait, and the others have the rest (tests/sharing.py). PROCESSES=0: one after another. The first of them that is lost
# ends the run, with the name of its test: a process that replaced it would begin with that test again.
#
# Before them, the other checks in two processes at a time, because each of them uses one core. The output of a check
# appears when it ends; make before 4.0 mixes their lines.
PROCESSES ?= 4
SHARED = -n $(PROCESSES) --max-worker-restart 0
CHECKS = typecheck lint triton-interpreted triton-compiled
test: setup $(TRITON)/.installed
	$(MAKE) -j 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) $(CHECKS)
	$(BIN)/python -m pytest $(SHARED) -m "not gpu and not slow_variants"

# The full grids, of which `make test` runs a part.
test-slow: setup $(TRITON)/.installed
	$(BIN)/python -m pytest $(SHARED) -m "slow_variants and not gpu"
	$(TRITON)/bin/python -m pytest -m slow_variants tests/kernels/triton

test-fast: setup
	$(BIN)/python -m pytest $(SHARED) -m "not gpu and not slow and not slow_variants"

# Property tests with new examples in each of so many runs; all other targets try the same examples every time.
RUNS ?= 5
test-random: setup
	for run in $$(seq $(RUNS)); do \
	  $(BIN)/python -m pytest -m "hypothesis and not gpu and not slow_variants" --hypothesis-profile random || exit 1; done

# All tests under load: next to eight busy processes, in processes that stall at random: over an hour. A result that differs from
# that of `make test` is a defect of the test, or a race of the product.
test-loaded: setup
	$(BIN)/python -m tests.loaded -- $(SHARED) -m "not gpu and not slow_variants"

# The whole control plane on a virtual clock, with random faults: 10 000 new seeds each day, in two processes of some
# two to three minutes. A seed that breaks a law: python -m tests.simulator --one SEED --shrink
simulate: setup
	$(BIN)/python -m tests.simulator --today --seeds 5000 & first=$$!; \
	  $(BIN)/python -m tests.simulator --today --first 5000 --seeds 5000; second=$$?; \
	  wait $$first && exit $$second

# What coordinator and ingresses cost with 10, 100 and 1 000 engines, on the virtual clock: a quarter of an hour of one
# core. The table is in docs/lab/performance.md.
scale: setup
	$(BIN)/python -m tests.simulator.scale

# On a machine with a GPU, with its own Python: answers, ceilings and times of one card, in 500 s at most. Needs torch,
# triton, transformers, msgspec, pyzmq and llguidance; no Ray, no network, no pytest. SWELL_TEST_DEVICE=cpu: tiny sizes.
gpu:
	rm -rf build/gpu && mkdir -p build/gpu && ln -s ../.. build/gpu/swell
	PYTHONPATH=build/gpu:. $(PYTHON) -m tests.gpu_report --json build/gpu/report.json

# On a machine with a GPU, with its own Python: the tests of one card, and those of whole engines that CI runs on CPU.
# Needs torch, transformers, msgspec, pyzmq, llguidance, prometheus-client, pyyaml, rich and aiohttp, and for the tests
# pytest, pytest-xdist, pytest-timeout and hypothesis. No Ray, no network.
ENGINES = tests/engine/outputs/test_token_exact.py tests/engine/outputs/test_features.py tests/engine/outputs/test_logprobs.py \
  tests/engine/outputs/test_failed_rows.py tests/engine/drafts/test_draft_model.py tests/engine/drafts/test_eagle.py tests/engine/drafts/test_mtp.py \
  tests/engine/test_handover.py tests/engine/kv/test_kept_blocks.py tests/engine/outputs/test_routed_experts.py \
  tests/worker/test_lora.py tests/worker/test_lora_runtime.py tests/worker/test_pooling.py \
  tests/worker/step/test_prompt_embeds.py tests/worker/memory/test_offload_store.py tests/cluster/test_local_weights.py
test-gpu:
	rm -rf build/gpu && mkdir -p build/gpu && ln -s ../.. build/gpu/swell
	SWELL_TEST_DEVICE=cuda PYTHONPATH=build/gpu:. $(PYTHON) -m pytest $(SHARED) -m "not slow_variants" tests/gpu $(ENGINES)

# The kernels for GPUs without a GPU: in Triton's interpreter, and compiled for three generations of GPUs. Two minutes
# of one core; `make -j 2 test-triton` uses two. In an environment of its own (740 MB), with the torch and
# the pytest of $(VENV).
test-triton: triton-interpreted triton-compiled

triton-interpreted: setup $(TRITON)/.installed
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest tests/kernels/triton

triton-compiled: setup $(TRITON)/.installed
	$(TRITON)/bin/python -m pytest -m "not slow_variants" tests/kernels/triton

PACKAGES = python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(TRITON)/.installed: tests/kernels/triton/requirements.txt $(STAMP)
	$(BIN)/python -m venv --clear $(TRITON)
	PYTHONWARNINGS=ignore $(TRITON)/bin/pip install --quiet --no-deps --requirement tests/kernels/triton/requirements.txt
	echo "import site; site.addsitedir('$$($(BIN)/$(PACKAGES))')" > "$$($(TRITON)/bin/$(PACKAGES))/of_venv.pth"
	touch $(TRITON)/.installed

# Conformance: third-party clients and checkers. Some ten minutes, and half a gigabyte of packages.
judges: setup $(CONFORMANCE)/.installed
	SWELL_CONFORMANCE=1 SWELL_FUZZ_CASES=2000 $(BIN)/python -m pytest --timeout 1800 -o faulthandler_timeout=2000 tests/conformance
	$(CONFORMANCE)/bin/python -m pytest --confcutdir tests/conformance/third_party tests/conformance/third_party

$(CONFORMANCE)/.installed: tests/conformance/requirements.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(CONFORMANCE)
	$(CONFORMANCE)/bin/pip install --quiet --upgrade pip
	$(CONFORMANCE)/bin/pip install --requirement tests/conformance/requirements.txt
	touch $(CONFORMANCE)/.installed

# Every causal model of transformers, small: equal or refused; some ten minutes, rewrites the page.
zoo: setup
	$(BIN)/python -m tests.zoo --splits --page docs/reference/models.md

# Every fault in every moment, under load: 312 cells, some hours on two cores; rewrites the tables of the page. Then 72
# cells of hosts and links, as root: those where the head is lost need `redis-server`.
fault-matrix: setup
	$(BIN)/python -m tests.faults --markdown docs/lab/fault-matrix.md
	$(BIN)/python -m tests.faults --hosts --markdown docs/lab/fault-matrix.md

# Builds the image for CPUs without a container engine, and serves from it: some ten minutes and 10 GB of disk, as root,
# with Debian's buildah and debootstrap.
image: setup
	SWELL_IMAGE=1 $(BIN)/python -m pytest tests/e2e/test_image.py

# Swell alone, or beside peers: BENCH="offline-m15 served" PEERS="vllm=PYTHON llamacpp=PYTHON" ARGS="--repeats 5".
BENCH_TO := build
bench: $(VENV)/.bench
	$(BIN)/python -m tests.benchmarks $(BENCH) $(if $(PEERS),--peers $(PEERS)) \
	  --json $(BENCH_TO)/benchmark.json --plot $(BENCH_TO)/benchmark.svg $(ARGS)

# The same, into the page: cases that do not run keep their rows.
bench-docs:
	$(MAKE) bench BENCH_TO=docs/lab ARGS="--markdown docs/lab/performance.md $(ARGS)"

$(VENV)/.bench: $(STAMP)
	$(PIP) install --editable '.[bench]'
	touch $(VENV)/.bench

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot see that the repository's top is the package `swell`, so it reads an installed copy.
typecheck: setup
	rm -rf build/typecheck build/lib && $(PIP) install --quiet --no-deps --no-build-isolation --target build/typecheck .
	ln -s ../../tests build/typecheck/tests
	cd build/typecheck && ../../$(BIN)/mypy --cache-dir ../mypy --config-file ../../pyproject.toml -p swell.configs -p swell.coordinator -p swell.engine -p swell.cluster \
	  -p swell.worker -p swell.kernels -p tests.benchmarks -p tests.faults -p tests.routing -p tests.simulator

clean:
	rm -rf $(VENV) $(CONFORMANCE) $(TRITON) build dist *.egg-info
