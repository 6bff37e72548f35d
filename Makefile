# Commands for users and developers. `make` alone lists them.

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
# One thread a test process: two processes of one thread are fastest on two cores. Bytecode is kept,
# also where the shell forbids it: the tests start hundreds of processes.
# One more than cores: some tests wait.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest
PARALLEL := -n $(JOBS) --maxprocesses 8 --dist loadfile
QUICK := tests/core tests/config tests/tasks tests/judges tests/evaluate tests/train/algorithms \
	tests/models/kv_cache tests/envs/textcraft

.PHONY: help setup test-setup vllm sglang verifiers appworld verl trinity triton demo test quick test-slow test-long
.PHONY: test-engines test-triton gpu-kit gpu
.PHONY: audit check lint types layers format docs constraints clean

help:  ## list the commands
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY)  ## install ludus and all that it uses into .venv

$(READY): pyproject.toml constraints.txt
	@scripts/setup.sh

test-setup: setup  ## install what only tests need: ALFWorld's engine, system programs
	@scripts/setup-tests.sh

vllm: setup  ## install vLLM's CPU build into .venv-vllm
	@scripts/setup-vllm.sh

sglang: setup  ## install SGLang for a CPU into .venv-sglang (CI does not: its tests are run by hand)
	@scripts/setup-sglang.sh

verifiers: setup  ## install verifiers, for its tasksets, into .venv-verifiers
	@scripts/setup-verifiers.sh

appworld: setup  ## install AppWorld's engine into .venv-appworld
	@scripts/setup-appworld.sh

verl: setup  ## install verl and vLLM's CPU build, for `backend: verl`, into .venv-verl
	@scripts/setup-verl.sh

trinity: setup  ## install Trinity-RFT and vLLM for `backend: trinity` into .venv-trinity (CI does not: its tests are run by hand)
	@scripts/setup-trinity.sh

triton: setup  ## install Triton, for its kernels, into .venv (1 GB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[triton]'

demo: setup  ## train an agent on BabyAI: demonstrations, SFT, GRPO, evaluation, report
	$(BIN)/ludus train recipes/babyai-tiny.yaml

test: test-setup lint types  ## run all checks, and all tests but those of the next commands
	$(PYTEST) $(PARALLEL) -m "not slow and not long and not engine"

quick: lint layers  ## run the fast unit tests (under a minute)
	$(PYTEST) -q $(PARALLEL) -m "not slow and not long and not engine" $(QUICK)

test-slow: test-setup  ## run the slow tests, and the variants that `make test` leaves out
	$(PYTEST) $(PARALLEL) -m "slow and not long and not engine"

test-long: test-setup  ## run what repeats slow tests with other settings (CI does not: run it before a release)
	$(PYTEST) $(PARALLEL) -m "long and not engine"

test-engines: setup  ## run the tests of foreign engines: of `make vllm`, `sglang`, `verifiers`, `appworld`, `verl`, `trinity`
	$(PYTEST) -m engine

test-triton: test-setup  ## run the tests of kernels in Triton, of `make triton`
	$(PYTEST) tests/kernels/in_triton tests/kernels/benchmark/test_work.py

gpu-kit: setup  ## collect the wheels that a bare GPU machine lacks
	@scripts/gpu-kit.sh

gpu:  ## on a GPU machine: install the kit, run the GPU tests, measure
	@scripts/gpu.sh

audit: setup  ## audit code, advisories, licences and secrets; write build/sbom.json
	@scripts/audit.sh

check: lint types layers  ## check format, lint, types and import layers

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/pytest -q tests/project/test_imports.py

format: setup  ## format the code, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## write the generated pages
	$(BIN)/python scripts/generate_docs.py

constraints: setup  ## pin the versions installed in .venv
	$(BIN)/python scripts/write_constraints.py

clean:  ## remove everything built; runs/ stays
	rm -rf .venv .venv-vllm .venv-sglang .venv-verifiers .venv-appworld .venv-verl .venv-trinity .venv-audit gpu-kit build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
