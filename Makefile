# `make demo` and `make test` set everything up in .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
# For .venv, CUDA kernels are built only where a GPU is visible, so that nobody waits for kernels that
# cannot run. `make cuda-check` compiles them anywhere; `make wheel` builds them wherever nvcc is found.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo auto || echo 0)
PYTEST_ARGS ?= -m 'not slow'

NATIVE := $(shell find common/csrc jax_frontend/csrc torch_frontend/csrc -type f)
CPP := $(filter %.h %.cc %.cu %.cuh,$(NATIVE)) $(wildcard tests/native/*.cc)

.PHONY: help setup demo test verify lint format cuda-check reference wheel clean

help:
	@echo "make setup       create .venv and build into it (demo, test, verify and lint do it themselves)"
	@echo "make demo        train one small MoE language model in JAX and PyTorch, compare every op"
	@echo "make test        run the tests"
	@echo "make verify      compare every op of the two front ends"
	@echo "make lint        ruff, clang-format, mypy"
	@echo "make format      rewrite the sources as ruff and clang-format want them"
	@echo "make cuda-check  compile every CUDA kernel (needs nvcc, no GPU)"
	@echo "make reference   rewrite docs/ops.md, api.md and router.md from the code"
	@echo "make wheel       build a wheel into dist/"
	@echo "make clean       remove .venv and everything built"

.venv/.requirements: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@touch $@

.venv/.built: .venv/.requirements setup.py pyproject.toml $(NATIVE)
	DUOMOE_CUDA=$${DUOMOE_CUDA:-$(GPU)} DUOMOE_REQUIRE=jax,torch $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --editable .
	@touch $@

setup: .venv/.built

demo: setup
	$(BIN)/duomoe demo --out out/demo

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

verify: setup
	$(BIN)/duomoe verify

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

cuda-check: .venv/.requirements
	DUOMOE_CUDA=1 $(BIN)/python setup.py --quiet build_ext --build-lib build/cuda-check
	@echo "every CUDA kernel compiles"

reference: setup
	$(BIN)/python -m duomoe.reference docs

wheel: .venv/.requirements
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist out *.egg-info common/duomoe/lib jax_frontend/*.so torch_frontend/*.so
