# Everything sets itself up: `make demo` and `make test` work on a fresh clone with nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Small models run fastest with one thread, one program per core.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test rehearse test-slow coverage mutants bench conformance lint format pocket constraints clean

demo: $(VENV)/.installed
	$(BIN)/frozencore demo --output runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

# Every shipped campaign on a tiny model: no cell of its report may be empty.
rehearse: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "rehearsal and not slow" tests/lab/rehearsal

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile search tests conformance

# Lines and branches of the library that the fast tests run, with what they miss; below 95 % it fails.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing

# Mutation tests of the maths and the adapter layer, in a copy under build/: an hour and more on one core.
mutants: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check mutmut==3.8.1
	rm -rf build/mutants && mkdir -p build/mutants && cp -r pyproject.toml docs src tests build/mutants
	cd build/mutants && $(abspath $(BIN))/python -m mutmut run --max-children 1
	cd build/mutants && $(abspath $(BIN))/python -m mutmut results

# Speed and memory on this machine's CPU, under fifteen minutes; DATA=DIR (the tasks' data) adds choice scoring.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/bench.py $(if $(DATA),--data-root $(DATA))

# PEFT's own test suite against frozen cores; needs the package index once.
conformance: $(VENV)/.installed-dev
	$(BIN)/python conformance/run.py --workers 2

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Trains the pocket model again, from generated text only.
pocket: $(VENV)/.installed
	$(BIN)/python -m frozencore.lab.pocket.pretrain --out src/frozencore/lab/pocket/model

constraints: $(VENV)/.installed-dev
	{ head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(VENV)/.installed $@
