# What a newcomer and a developer run. `make` alone lists it.

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
# Two workers of one thread each are fastest on two cores; more cores take more workers.
JOBS ?= auto
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: help setup vllm alfworld demo test check lint types layers format system constraints docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY)  ## make .venv and install ludus into it, with everything

$(READY): pyproject.toml constraints.txt
	@scripts/setup.sh

vllm: setup  ## make .venv-vllm, an environment with vLLM's CPU build
	@scripts/setup-vllm.sh

alfworld: setup  ## add ALFWorld's engine to .venv (its planner is compiled: some minutes)
	@$(BIN)/python -c 'import alfworld, fast_downward, textworld' 2>/dev/null \
		|| $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[alfworld]'

demo: setup  ## train an agent on BabyAI: demonstrations, SFT, GRPO, evaluation, report
	$(BIN)/ludus train recipes/babyai-tiny.yaml

test: setup system lint types  ## all checks and all tests
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist loadfile

check: lint types layers  ## format, lint, types and import layers, without the other tests

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/pytest -q tests/project/test_imports.py

format: setup  ## format the code, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

system:  # the programs that some tests need: installed where that is possible, named where not
	@scripts/test-system.sh

docs: setup  ## write the generated pages anew
	$(BIN)/python scripts/generate_docs.py

constraints: setup  ## pin what is installed in .venv
	$(BIN)/python scripts/write_constraints.py

clean:  ## remove what was built; runs/ stays
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
