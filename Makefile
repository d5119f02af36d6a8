# Two commands for a fresh machine: `make run` and `make test`. Each target prints what it does.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.run-installed
BENCH_STAMP := $(VENV)/.bench-installed
HYDRA_NEXT := $(VENV)/hydra-1.4
, := ,

.DEFAULT_GOAL := help
.PHONY: help setup run test test-quick lint style unit bench gpu-check docs slurm-up slurm-down clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

# $(call install,EXTRAS): .venv with the project and these extras, in the versions of constraints.txt.
# pip compiles on one core. What does not compile is for another Python: pip passes over it, too.
define install
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
    { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13; try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]'
@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
@$(BIN)/python -m compileall -q orchestrator jobs slurm
endef

$(RUN_STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV): what a run with torch needs (make setup installs the rest)"
	$(call install,torch)
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV): Python packages with the versions of constraints.txt"
	$(call install,torch$(,)mindspore$(,)report$(,)mlflow$(,)wandb$(,)peers$(,)search$(,)dev)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(HYDRA_NEXT) \
	    hydra-core==1.4.0rc3 omegaconf==2.4.1rc1
	@touch $(RUN_STAMP) $@

setup: $(STAMP)  ## make .venv and install everything into it

run: $(RUN_STAMP)  ## train the digits on 2 simulated nodes x 2 ranks, four micro-steps per update
	@echo "== python -m orchestrator.launch job=digits (2 simulated nodes x 2 ranks, 4 micro-steps per update)"
	@$(BIN)/python -m orchestrator.launch job=digits

test: style  ## lint, types, import directions and every test
	@$(BIN)/python -m tests.gate

test-quick: setup  ## the tests of the inner loop: no SLURM, no MindSpore, no whole runs
	@echo "== pytest, three files at a time"
	@$(BIN)/python -m pytest --phase=quick -n 3 --dist loadfile

lint: style  ## the same, and pyright
	@echo "== pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python

style: setup  ## ruff, layout and import directions
	@echo "== ruff"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== import-linter"
	@$(BIN)/lint-imports

unit: setup  ## the tests, and pyright (PYTEST_ARGS: some tests)
ifdef PYTEST_ARGS
	@echo "== pytest $(PYTEST_ARGS)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@$(BIN)/python -m tests.gate
endif

$(BENCH_STAMP): $(STAMP)
	@echo "== installing what is compared with: Accelerate, Lightning Fabric"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $(BENCH_STAMP)

bench: setup $(BENCH_STAMP)  ## side by side with peers, an hour (BENCH_ARGS=--quick: minutes)
	@echo "== benchmarks"
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

gpu-check: setup  ## what has to hold on GPUs, in ten minutes: a table, and gpu-check.json
	@$(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

docs: setup  ## build the documentation into build/site
	@$(BIN)/python -m properdocs build --strict

slurm-up: setup  ## start a real SLURM with four nodes on this machine
	@echo "== SLURM development cluster: up"
	@$(BIN)/python -m slurm up

slurm-down: setup  ## end it
	@echo "== SLURM development cluster: down"
	@$(BIN)/python -m slurm down

clean:  ## remove what was built (not your runs)
	@echo "== removing $(VENV) and caches"
	@rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache build dist *.egg-info
