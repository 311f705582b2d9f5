# Every target works on a fresh clone: it installs its requirements into .venv on first use.
.DEFAULT_GOAL := all
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
RUNNABLE := .venv/.runnable
SYSTEM := .venv/.group-system
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: all check install run test test-system test-faults test-cluster test-engine certified continuation-table test-trainers test-agents test-deploy test-monitoring test-trackers test-ui examples learn release cassettes golden fuzz bench bench-growth lint types docs lock clean

all: lint types test test-system  ## the checks that every change must pass

check: lint types  ## style, types, and the tests of what changed since this branch left main, in less than a minute for a small change
	$(BIN)/python -m pytest -n 2 $$($(BIN)/python -m tests.changed)

install: $(SYSTEM)  ## install everything into .venv, test packages included

$(RUNNABLE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing TokenTape into .venv (about 150 MB)"
	@$(PIP) --editable ".[client]"
	@touch $(RUNNABLE)

$(READY): $(RUNNABLE) tests/system/trainers/requirements.txt
	@echo "Installing the packages of the tests into .venv and .trainers (about 800 MB)"
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) --editable ".[arrow,client,otel,tokenizer]" --group dev
	@rm -rf .trainers && $(BIN)/python -m pip install --no-deps --ignore-requires-python --target .trainers -r tests/system/trainers/requirements.txt
	@touch $(READY)

.venv/.group-%: $(READY)
	@echo "Installing the packages of the group '$*' of pyproject.toml into .venv (system: about 600 MB, others: 100 MB)"
	@$(PIP) --group $*
	@touch $@

run: $(RUNNABLE)  ## run the proxy on LISTEN=127.0.0.1:8400, with the simulator or ENGINE=http://…; CONFIG=file
	@$(BIN)/tokentape serve $(if $(LISTEN),--listen $(LISTEN)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(CONFIG),--config $(CONFIG))

# Bytecode of the sources and of the tests is cached, also where PYTHONDONTWRITEBYTECODE is set: without, each process that a
# test starts would compile the sources again, which doubles the time.
test test-system: export PYTHONDONTWRITEBYTECODE =
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Tests of modules that start many processes: they belong to make test-system.
PROCESSES := tests/cli/test_main.py tests/server/test_shutdown.py tests/server/test_supervisor.py tests/test_skips.py

test: $(READY)  ## run the tests of all modules, of the laws and of the pages
	$(PYTEST) --ignore=tests/system $(PROCESSES:%=--ignore=%)

test-system: $(SYSTEM)  ## run the tests of whole processes: faults, fuzzing, security, costs, replicas, examples
	$(PYTEST) tests/system $(PROCESSES)

test-faults: $(SYSTEM)  ## kill, freeze and fill up processes under load, 8 minutes, and a training loop, 5; SECONDS_LONG=, GROUPS_LONG=, SEED=; SOAK=1: an hour of mixed traffic, in which memory must not grow
ifdef SOAK
	$(BIN)/python -m tests.system.faults.soak --seconds $(or $(SECONDS_LONG),3600) $(if $(SEED),--seed $(SEED))
else
	$(BIN)/python -m tests.system.faults.run --seconds $(or $(SECONDS_LONG),420) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.system.faults.training.run --groups $(or $(GROUPS_LONG),200) $(if $(SEED),--seed $(SEED))
endif

test-cluster: $(SYSTEM)  ## kill, freeze, reshard and upgrade a Redis Cluster, a Valkey cluster and Sentinels under load, about 15 minutes
	$(BIN)/python -m pytest --timeout 400 -o log_cli=true -o log_cli_level=INFO tests/system/cluster

test-engine: $(SYSTEM)  ## test with a real vLLM, SGLang and llama.cpp on this CPU, built once in the user's cache directory
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest tests/system/real_engines

certified: $(SYSTEM)  ## run `tokentape certify` on the engines of test-engine, and write docs/certified and docs/exactness.md
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest tests/system/real_engines/test_certified.py --record-certified
	$(BIN)/python -m docs.generate

continuation-table: $(READY)  ## print which linear rollouts are one sequence, by chat template: in process, on a real vLLM and a real SGLang
	$(BIN)/python -m tests.support.continuation_table
	$(BIN)/python -m tests.support.continuation_table faithful
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest -n 0 tests/system/real_engines/templates_of_trl.py

test-trainers: $(SYSTEM)  ## run docs/trainers.md in the loops of TRL, verl, OpenRLHF and AReaL on this CPU, with a real vLLM
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest -vv tests/system/trainers/loops

test-deploy: $(SYSTEM)  ## check deploy/: schemas, linters, the Dockerfile's steps, a real load balancer with real replicas
	$(BIN)/python -m tests.system.deploy.environment
	$(BIN)/python -m pytest --timeout 300 tests/system/deploy

test-agents: $(SYSTEM)  ## run third-party clients and agents, update docs/clients.md, and print which have newer versions (requires node and npm)
	$(BIN)/python tests/system/agents/environment.py
	$(BIN)/python tests/system/real_engines/environment.py
	$(BIN)/python -m pytest -vv tests/system/agents
	$(BIN)/python -m tests.system.agents.newer

test-monitoring: $(SYSTEM)  ## check rules, alerts and the dashboard's queries with a real Prometheus (Debian's) and a real proxy
	$(BIN)/python -m pytest tests/system/monitoring

examples: $(SYSTEM)  ## run each of examples/ in full with the simulator, and print its output
	$(BIN)/python -m pytest -n 0 tests/system/examples --whole --timeout 600

learn: $(SYSTEM)  ## train a small transformer to use a tool, with a real vLLM on this CPU, and plot its rewards, in minutes; STEPS=
	@rm -rf build/learned
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONPATH=. \
	  $$($(BIN)/python -c "from tests.system.real_engines.environment import ensure; print(ensure().python)") \
	  examples/grpo_torch.py --tokentape $(BIN)/tokentape --out build/learned $(if $(STEPS),--steps $(STEPS))
	$(BIN)/python examples/plots.py --rewards --file build/learned/rows.ndjson --out build/learned/rewards.svg

test-trackers: .venv/.group-trackers  ## log rollouts to W&B (offline) and to MLflow, which it installs (100 MB)
	$(BIN)/python -m pytest tests/system/trackers

test-ui: .venv/.group-ui  ## test /ui in a headless Chromium; PICTURES=docs/images updates the screenshots
	$(BIN)/python -m pytest tests/system/browser $(if $(PICTURES),--pictures $(PICTURES))

release: $(RUNNABLE)  ## build HEAD's sdist and wheel in dist/, with an SBOM, and check them in empty environments of the Pythons at hand
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group release
	$(BIN)/python -m tests.system.programs.release

cassettes: $(READY)  ## record responses of ENGINE=http://… for the tests; FORCE=1 replaces existing ones; SET=, ONLY= (tests/cassettes/README.md)
	$(BIN)/python -m tests.cassettes.record $(if $(FORCE),--force) $(if $(SET),--set $(SET)) $(if $(ONLY),--only '$(ONLY)') $(or $(ENGINE),$(error Set ENGINE=http://…))

golden: $(READY)  ## record the exports and wire bytes of tests/golden again; RELEASE=0.2.0: and the store of that release
	$(BIN)/python -m tests.golden.record $(RELEASE)

fuzz: $(SYSTEM)  ## fuzz requests, streams, records, stores and imports with new seeds; CASES= scales the number of cases
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/system/fuzz --cases $(or $(CASES),110000)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m hypothesis --hypothesis-profile thorough --timeout 600

bench: $(READY)  ## measure the performance targets (docs/performance.md); ROWS="unstreamed latency" for some
	$(BIN)/python -m benchmarks $(ROWS)

bench-growth: $(READY)  ## measure how costs grow with prompts, calls, steps, rollouts and workers; CURVES="prompts steps profile" for some
	$(BIN)/python -m benchmarks.growth $(CURVES)

# Without ruff's cache: it is keyed by each file's own text, but the order of imports depends on which modules exist.
lint: $(READY)  ## check style and formatting, and report words to avoid and long files and functions
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m docs.style

types: $(READY)  ## check types
	$(BIN)/mypy

docs: .venv/.group-docs  ## generate pages and the site, build/docs/index.html
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --conf-dir docs . build/docs
	@echo "build/docs/index.html"

lock:  ## update constraints.txt within the ranges of pyproject.toml
	rm -rf .venv && $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[arrow,client,otel,tokenizer]" --group dev --group system --group docs --group release --group trackers --group ui
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:  ## remove generated files, but not recorded steps (./data)
	rm -rf .venv .trainers .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* dist build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
