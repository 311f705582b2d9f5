# Every target works first on a fresh clone: it installs what it needs into .venv, and again at once when nothing changed.
.DEFAULT_GOAL := all
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
RUNNABLE := .venv/.runnable

.PHONY: all install run test test-faults test-engine test-trainers test-agents test-deploy test-monitoring test-ui examples cassettes golden fuzz bench bench-growth lint types docs lock clean

all: lint types test  ## what must hold before anything lands

install: $(READY)  ## install everything into .venv, test packages included

$(RUNNABLE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing TokenTape into .venv"
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $(RUNNABLE)

$(READY): $(RUNNABLE) tests/system/trainers/requirements.txt
	@echo "Installing the packages of the tests into .venv (about 1 GB)"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[arrow,client,msgpack,tokenizer]" --group dev
	@rm -rf .trainers && $(BIN)/python -m pip install --quiet --no-deps --target .trainers -r tests/system/trainers/requirements.txt
	@touch $(READY)

run: $(RUNNABLE)  ## the proxy on 127.0.0.1:8400; ENGINE=http://… for a real engine, else the simulator
	@$(BIN)/tokentape serve $(if $(ENGINE),--engine $(ENGINE)) $(if $(CONFIG),--config $(CONFIG))

test: $(READY)  ## the specification, against real parts
	$(BIN)/python -m pytest -n 3 --dist loadfile

test-faults: $(READY)  ## everything killed, stopped and filled under load, for some 8 minutes; SECONDS_LONG=, SEED= say otherwise
	$(BIN)/python -m tests.system.faults.run --seconds $(or $(SECONDS_LONG),420) $(if $(SEED),--seed $(SEED))

test-engine: $(READY)  ## against a real vLLM and a real llama.cpp on this CPU; built once into the user's cache folder
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest tests/system/real_engines

test-trainers: $(READY)  ## docs/trainers.md in the trainers' own loops (TRL, verl, OpenRLHF, AReaL), on this CPU, with a real vLLM
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest -vv tests/system/trainers/loops

test-deploy: $(READY)  ## the files of deploy/: schemas, linters, the Dockerfile's steps, a real balancer before real replicas
	$(BIN)/python -m tests.system.deploy.environment
	$(BIN)/python -m pytest --timeout 300 tests/system/deploy

test-agents: $(READY)  ## other people's clients and agents, docs/clients.md's table (needs node, npm); fetched once into the user's cache folder
	$(BIN)/python tests/system/agents/environment.py
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest -vv tests/system/agents

test-monitoring: $(READY)  ## rules, alerts and the dashboard's queries, against a real Prometheus (Debian's) and a real proxy
	$(BIN)/python -m pytest tests/system/monitoring

examples: $(READY)  ## each of examples/ as long as its users run it, before the simulator; prints what they print
	$(BIN)/python -m pytest -n 0 tests/system/examples --whole --timeout 600

test-ui: $(READY)  ## the page /ui in a real headless Chromium; PICTURES=docs/images takes its pictures anew
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group ui
	$(BIN)/python -m pytest tests/system/browser $(if $(PICTURES),--pictures $(PICTURES))

cassettes: $(READY)  ## answers of the engine at ENGINE=http://… for the tests to play; FORCE=1 records those there anew
	$(BIN)/python -m tests.cassettes.record $(if $(FORCE),--force) $(or $(ENGINE),$(error ENGINE=http://… says which engine))

golden: $(READY)  ## the recorded store, exports and wire bytes that tests/golden compares with, recorded again
	PYTHONPATH=.:tests/support $(BIN)/python tests/golden/record.py

fuzz: $(READY)  ## requests, streams and records that nobody would send, with fresh seeds; CASES=… for another number
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/system/fuzz --cases $(or $(CASES),110000)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m hypothesis --hypothesis-profile thorough --timeout 600

bench: $(READY)  ## the table of performance targets, with the bare proxy in the same run
	$(BIN)/python -m benchmarks

bench-growth: $(READY)  ## how costs grow with prompts, calls, steps, rollouts and workers, and the store; CURVES="prompts steps costs" for some
	$(BIN)/python -m benchmarks.growth $(CURVES)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)  ## the generated pages, the generated blocking client, and the site: build/docs/index.html
	$(BIN)/python -m docs.generate
	@$(BIN)/python -c "import furo" 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --conf-dir docs . build/docs
	@echo "build/docs/index.html"

lock: ## what constraints.txt pins, anew from the ranges of pyproject.toml
	rm -rf .venv && $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[arrow,client,msgpack,tokenizer]" --group dev --group docs --group ui
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:  ## everything that was made here, but not recorded steps (./data)
	rm -rf .venv .trainers .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* dist build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
