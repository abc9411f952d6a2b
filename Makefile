# Everything a machine needs is set up here: `make demo` and `make test` work from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# oracles with float32 in their data, records or models (Mamba casts its logits; torch quantises and groups float32 alone)
FLOAT32 := joint_norm or theory_is_the_gradients_energy or probes_are_as_large or arrays_in_and_out or clipped_in_place \
	or leaves_its_trunk_alone or TestBuffers or test_refusals \
	or MambaForCausalLM or MixtralForCausalLM or GraniteMoeForCausalLM or losses_that_are_not or quantised or narrow_trunk_under_a_wide_head \
	or parameters_of_nobody
QUICK := $(addprefix tests/,oracle/test_heads.py oracle/test_engines.py oracle/test_split.py oracle/test_estimators.py \
	oracle/test_estimator_formulas.py contract/test_estimator_contract.py contract/test_split_refusals.py \
	contract/test_imports.py contract/test_testing.py oracle/test_feedback.py oracle/test_learned_feedback.py \
	oracle/test_closed_forms.py oracle/test_map_rules.py unit/test_gradient_learner.py unit/test_optimizers.py unit/test_tangents.py \
	unit/test_theory.py unit/test_training.py unit/test_report_tables.py unit/test_report_costs.py unit/test_runs_config.py \
	docs/test_numbers.py docs/test_repository.py)

.PHONY: demo test quick float64 docs coverage lint format bench plant-bugs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# One thread for each worker: with more threads than cores each waits for the other.
test quick float64 coverage: export OMP_NUM_THREADS = 1

demo: $(READY)
	$(BIN)/splitfg demo

# Three workers on two cores: tests that start processes leave a core idle.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# The fastest meaningful tests: every room's own oracle or contract, no processes, browsers or long statistics.
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(QUICK)

# The core with float64 as torch's default dtype.
float64: $(READY)
	SPLITFG_TEST_DTYPE=float64 $(BIN)/python -m pytest -n 2 --dist worksteal tests/oracle -k "not ($(FLOAT32))"

docs: $(READY)
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# Branch coverage of the whole suite; fails below the floor. Slower than `make test`.
coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=html --cov-fail-under=91

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
	$(BIN)/python -m tools.plant_bugs

clean:
	rm -rf $(VENV) build dist
