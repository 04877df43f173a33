# Two commands: `make serve` and `make test`. What they need is installed into .venv once.
#
#   PYTHON       interpreter, 3.11 to 3.14 (default: the first that is found)
#   TORCH        cpu or cuda (default: cuda where there is an NVIDIA GPU)
#   TORCH_INDEX  package index that has the CPU build of torch
#   WORKERS      processes that run the tests without Ray, about 3 GB each (default: 2)
#   ARGS         further arguments for the command
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
WORKERS ?= 2
LOCK := uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-annotate --no-header --quiet
export TORCH TORCH_INDEX

.PHONY: serve test test-all test-clients check mutants fuzz-files format lock docs clean

serve: $(STAMP)
	@exec $(BIN)/paceline serve $(ARGS)

test: $(STAMP) check
	.ci/run-tests $(BIN)/python $(WORKERS) $(ARGS)

# The same tests on every supported Python of this machine, each in a virtual environment of its own.
test-all:
	@.ci/test-all $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/paceline check deployments/*.yaml

# Mutation testing of one folder: make mutants FOLDER=engine/core ARGS='--num 50 --seed 1'. Minutes; not part of CI.
mutants: $(STAMP)
	$(BIN)/python tests/support/mutants.py $(FOLDER) $(ARGS)

# 100,000 mutated files for each reader of model files: make fuzz-files ARGS='--num 1000 --readers gguf'. About an
# hour on an idle machine, most of it GGUF; `make test` takes 500 of each.
fuzz-files: $(STAMP)
	$(BIN)/python tests/support/fuzz_files.py $(ARGS)

# The documentation as a site in build/site.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --quiet --site-dir build/site

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Writes constraints.txt for all platforms. Pinned versions stay; ARGS=--upgrade takes the newest.
lock: $(STAMP)
	$(BIN)/$(LOCK) $(ARGS) --output-file constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@python=$$(.ci/find-python $(PYTHON)) && "$$python" .ci/install.py $(VENV) dev
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Real clients, in environments of their own, against `paceline serve` with the default model and against a scripted
# engine. With PACELINE_URL and PACELINE_MODEL they talk to a running server in place of the former. Needs npm.
test-clients: $(STAMP) $(CLIENTS)/.installed
	PACELINE_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

$(CLIENTS)/.installed: $(STAMP) $(wildcard tests/clients/requirements*.txt) tests/clients/package.json
	mkdir -p $(CLIENTS)
	$(BIN)/python .ci/install.py $(CLIENTS)/venv -r tests/clients/requirements.txt
	$(BIN)/python .ci/install.py $(CLIENTS)/measure -r tests/clients/requirements-measure.txt
	$(BIN)/python .ci/install.py $(CLIENTS)/aider -r tests/clients/requirements-aider.txt
	cp tests/clients/package.json $(CLIENTS)/ && npm install --prefix $(CLIENTS) --silent --no-fund --no-audit
	@touch $@
