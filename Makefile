# Everything a machine needs is set up here: `make demo` and `make test` work from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick float64 docs coverage lint format bench plant-bugs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/splitfg demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The fastest meaningful tests: every room's own oracle or contract, no processes, browsers or long statistics.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/oracle tests/unit

# The core with float64 as torch's default dtype.
float64: $(READY)
	SPLITFG_TEST_DTYPE=float64 $(BIN)/python -m pytest -n 2 --dist worksteal tests/oracle tests/statistical tests/contract/test_estimator_contract.py

docs: $(READY)
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# Branch coverage of the whole suite; fails below the floor. Slower than `make test`.
coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=html --cov-fail-under=90

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks

plant-bugs: $(READY)
	$(BIN)/python tools/plant_bugs.py

clean:
	rm -rf $(VENV) build dist
