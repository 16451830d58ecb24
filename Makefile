# `make help` lists the targets. Each makes .venv by itself where it is needed (scripts/setup.sh).
#
# DEMO_ARGS, PYTEST_ARGS, GATE_ARGS, TORTURE_ARGS and BENCH_ARGS are passed on, for example:
# make demo DEMO_ARGS="--tokens 6000"

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup model gemma demo test test-unit test-vllm gate torture check format bench-tax bench-tiers bench-policies clean

BIN := .venv/bin
MODEL := .demo/SmolLM2-135M-Instruct

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv: vLLM for the CPU, kvkeep, tests, linters
	@bash scripts/setup.sh

model: setup ## make the small real model that demo and tests serve
	@$(BIN)/python scripts/make_model.py $(MODEL)

demo: model ## long questions cold, from memory, from disk after a restart
	@$(BIN)/python -m examples.demo --model $(MODEL) $(DEMO_ARGS)

test: test-unit test-vllm ## all tests

test-unit: setup ## the tests that need no engine
	$(BIN)/python -m pytest -m "not vllm" $(PYTEST_ARGS)

# Status 5 is pytest's "nothing was selected".
test-vllm: model ## the tests with the real engine and the real model
	$(BIN)/python -m pytest -m vllm $(PYTEST_ARGS) || [ $$? -eq 5 ]

gemma: setup ## make Gemma 3 270M, a real model with sliding windows (536 MB)
	@$(BIN)/python scripts/make_gemma.py .demo/gemma-3-270m

gate: model gemma ## output with the cache is token-exact to output without it: all cases (about an hour)
	$(BIN)/python -m tests.gate --results benchmarks/results/gate.json $(GATE_ARGS)

torture: model ## kill the engine 50 times, damage 1,000 kept files
	$(BIN)/python -m tests.torture --results benchmarks/results/torture.json $(TORTURE_ARGS)

check: setup ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: setup ## let ruff write what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-tax: model ## what kvkeep costs where nothing hits
	$(BIN)/python benchmarks/tax.py $(BENCH_ARGS)

bench-tiers: setup ## how fast each tier stores and loads
	$(BIN)/python benchmarks/tiers.py $(BENCH_ARGS)

bench-policies: setup ## hit rates of the policies on real traces
	$(BIN)/python benchmarks/policies.py $(BENCH_ARGS)

clean: ## remove what the other targets made
	rm -rf .venv .demo .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build site
