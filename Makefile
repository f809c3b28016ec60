# make demo   a whole distillation on the embedded world, through the MCP server
# make test   the cheap checks and all tests, browser included
# make check  formatters, linters, types, layers

BIN := .venv/bin
SEED ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test check setup clean

demo:
	@scripts/setup.sh demo
	@$(BIN)/stillroom demo --seed $(SEED) $(if $(SMOKE),--smoke) $(DEMO_FOLDER)

setup:
	@scripts/setup.sh test

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pytest -q $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
