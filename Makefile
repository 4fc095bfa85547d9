# Each target sets up what it needs first: .venv (requirements/) and the model (build/models/).
# Needs make and Python 3.11 or 3.12; quick when nothing has changed.

PYTHON ?= python3
RETENTION ?= 0.5
ARGS ?=
BIN := .venv/bin

# tests start several processes; threads that spin at each barrier would slow them down many times
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help env model demo test lint bench clean

help:
	@echo "make demo [RETENTION=0.5]  chat with a real server on compressed KV, then uncompressed"
	@echo "make test [ARGS=...]       all tests that this machine can run (ARGS go to pytest)"
	@echo "make lint                  ruff: rules and formatting"
	@echo "make bench [ARGS=...]      tokens/s of tangram and torch_native on this CPU"
	@echo "make model                 only the model; make env: only .venv; make clean: neither"

env:
	@$(PYTHON) requirements/bootstrap.py

model: env
	@$(BIN)/python -m bench.smollm2 >&2

# the argument is checked before a first run sets anything up: that takes minutes
demo:
	@$(PYTHON) -m tangram_sglang.cli.retention '$(RETENTION)'
	@$(MAKE) --no-print-directory model
	@$(BIN)/tangram demo --retention '$(RETENTION)' $(ARGS)

test: model
	@$(BIN)/python -m pytest $(ARGS)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: model
	@$(BIN)/python -m bench.cpu_throughput $(ARGS)

clean:
	rm -rf .venv build
