# make demo   a whole distillation on the embedded world, through the MCP server
# make dashboard  in a second terminal: waits for the demo's folder and shows it in the browser
# make quick  in a minute: formatter, linter, layers, and the tests that load no heavy library
#             (torch, transformers), open no browser and start no process
# make test   the cheap checks and all tests, browser included, in WORKERS processes at once
# make check  formatters, linters, types, layers, and the site
# make docs   the documentation as a site in build/site, strictly
# make trust  shows every promise of docs/trust.md again and writes that page, in about half an
#             hour; TRUST="--only 8 --full" for one promise in its long form
# make stress  all tests ten times, each time in another order, on a machine that is kept busy; says
#             which fail in which rounds; TIMES=3 LOAD=0 for less, SEED=7 ARGS="tests/unit" for a part
# make families  runs every use of every family's tiny model, writes docs/families.md, and fails if
#             one that said yes says no, in about ten minutes; FAMILIES="--only qwen3 --loud" for one
# make real   what each method teaches a real SmolLM2-135M (93 MB, installed by the set-up), into
#             docs/results.md; an hour and more for three tasks on two idle cores; figures that are
#             there are kept; REAL="--tasks tickets --seeds 2" for a part
# make package  the wheel, the sdist and the desktop bundle in dist/, each checked by its own
#             validator, and the server started from the wheel in a fresh environment
# make conformance  MCP's own suites and its inspector against our server, in about three minutes;
#             they and Node 22 come from npm into the user's cache folder

BIN := .venv/bin
SEED ?= 1
# Two for a processor, as a test often waits for another process, if there are 2 GB for each; else
# three for two processors.
WORKERS ?= $(shell p=$$(getconf _NPROCESSORS_ONLN); few=$$(( (p * 3 + 1) / 2 )); \
  gb=$$(( $$(getconf _PHYS_PAGES 2>/dev/null || echo 0) / 262144 )); \
  n=$$(( gb / 2 >= p * 2 ? p * 2 : few )); echo $$(( n > 8 ? 8 : n )))
PYTEST = $(BIN)/pytest -q --dist worksteal -n
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start some hundred processes, which take a second each to compile what they import.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo dashboard quick test stress check trust families real conformance package docs setup tools clean

demo:
	@scripts/setup.sh demo
	@$(BIN)/stillroom demo --seed $(SEED) $(if $(SMOKE),--smoke) $(DEMO_FOLDER)

dashboard:
	@n=0; until [ -d demo-project/runs ] && [ -x $(BIN)/stillroom ]; do n=$$((n + 1)); \
	  [ $$n -le 900 ] || { echo 'error: no demo-project here; run make demo first' >&2; exit 1; }; sleep 1; done
	@$(BIN)/stillroom dashboard --workspace demo-project --open

setup:
	@scripts/setup.sh test

tools:
	@scripts/setup.sh quick

check: tools docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

quick: tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(PYTEST) logical --maxprocesses 8 --quick tests/unit tests/invariants $(ARGS)

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(PYTEST) $(WORKERS) $(ARGS)

stress: setup
	$(BIN)/python scripts/stress.py --times $(or $(TIMES),10) --workers $(WORKERS) \
	  $(if $(filter 0,$(LOAD)),--no-load) $(if $(filter command% environment%,$(origin SEED)),--seed $(SEED)) $(ARGS)

trust: setup
	$(BIN)/python tests/thorough/run.py $(TRUST)

families: setup
	$(BIN)/python benchmarks/families/run.py $(FAMILIES)

real: setup
	$(BIN)/python benchmarks/real/results.py build/real $(REAL)

conformance: tools
	$(BIN)/python benchmarks/mcp/conformance.py $(ARGS)
	$(BIN)/python benchmarks/mcp/inspector.py

docs: tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

package: tools
	scripts/package/check.sh

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
