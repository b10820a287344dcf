# `make demo` runs the main job, `make test` the tests of a change, `make test-all` all tests. Each target makes .venv by
# itself the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all lint bench docs oracles clean
.DEFAULT_GOAL := demo

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: $(READY)
	$(BIN)/dissensus demo

# Tests of a file share a worker, and with it what the file trains once.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

bench: $(READY)
	$(BIN)/python benchmarks/members.py --json benchmarks/results/members.json
	$(BIN)/python benchmarks/third_party.py --json benchmarks/results/third_party.json
	$(BIN)/python benchmarks/sweeps.py --json benchmarks/results/sweeps.json
	$(BIN)/python benchmarks/twin.py --json benchmarks/results/twin.json
	$(BIN)/python benchmarks/export.py --json benchmarks/results/export.json
	$(BIN)/python benchmarks/demo.py --json benchmarks/results/demo.json
	$(BIN)/python benchmarks/audit_example.py --json benchmarks/results/audit_example.json
	$(BIN)/python docs/tables

docs: $(READY)
	$(BIN)/python docs/tables
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Golden tensors of other packages, which ours is tested against; they need an environment of their own.
oracles:
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip install --quiet --disable-pip-version-check -r oracles/requirements.txt
	.venv-oracles/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r oracles/requirements-no-deps.txt
	.venv-oracles/bin/python oracles/masksembles_layer.py tests/golden/masksembles.safetensors
	.venv-oracles/bin/python oracles/attacks_foolbox.py tests/golden/attacks.safetensors
	.venv-oracles/bin/python oracles/attacks_torchattacks.py tests/golden/attacks.safetensors
	.venv-oracles/bin/python oracles/attacks_autoattack.py tests/golden/attacks.safetensors

clean:
	rm -rf $(VENV) .venv-oracles site build dist runs
