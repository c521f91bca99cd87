# Everything a newcomer and the CI run. `make help` lists the targets; each may be run twice, or beside another.

PYTHON ?= python3.11
BIN := .venv/bin
# Three workers for two cores, and one more for the older servers beside them (`make test`): two fifths of their time they
# wait, for a server, a poll, a process that ends. A worker starts at most one Spark session and one PostgreSQL server,
# both only when a test asks for them; tests/conftest.py puts the files in order.
WORKERS ?= 3
PYTEST_ARGS ?=
SEEDS ?= 20
ROUNDS ?= 100
CUTS ?= 200
BAD_DAYS ?= 500
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 $(PYTEST_ARGS)
# Tests by their names, whatever room they are in.
named = $(foreach name,$(1),$(or $(wildcard tests/*/test_$(name).py tests/*/*/test_$(name).py),$(error no test_$(name).py)))
# Where versions differ: catalogs, markers, binary forms, hand-over. The rest does not ask for the version.
ON_15 = $(call named,attached_partitions source_connection source_positions source_snapshots source_slots catalog publication selection check init \
	types_against_postgresql wait handover never_early log_streaming log_reconnect log_rollbacks)
# The protocol's version 4 came with 16, failover slots with 17.
ON_16 = $(call named,source_slots types_against_postgresql log_streaming log_reconnect log_rollbacks)
ON_17 = $(call named,source_slots log_streaming log_rollbacks)

.DEFAULT_GOAL := help
.PHONY: help setup dist demo up down check docs quick test classes servers test-18 test-17 test-16 test-15 soak bench

# What must be there before anything is fetched: one sentence, or nothing.
missing = $(shell $(PYTHON) -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	|| { echo "Headwater needs Python 3.11, and $(PYTHON) is not one: install it, or name it with make PYTHON=..."; exit; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	|| { echo "$(PYTHON) cannot make environments: install its venv module (on Debian: python3.11-venv)"; exit; }; \
	PYTHONPATH=spark_jobs PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m headwater.java 2>&1)

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 15

setup:  ## the environment in .venv and the jars in .jars
	@$(eval sentence := $(missing))$(if $(sentence),$(error $(sentence)))$(PYTHON) requirements/install.py

dist: setup  ## source distribution and wheel in dist/, the wheel made from the source distribution
	rm -rf dist
	$(BIN)/python -m build --no-isolation

demo: setup $(if $(LAKE),servers)  ## the whole way on an embedded PostgreSQL and a local Airflow, in two to three minutes; LAKE=s3: with the lake in an S3 server
	@$(if $(LAKE),$(BIN)/python tests/servers/with_$(LAKE).py) $(BIN)/headwater demo $(if $(LAKE),--lake s3://headwater/demo)

up: setup  ## the same, left running; prints the address of the Airflow UI
	@$(BIN)/headwater demo --keep-running

down: setup  ## ends what `make up` left running
	@$(BIN)/headwater demo --stop

check: setup  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## the documentation as a site in site/, which needs no network; any warning is an error
	$(BIN)/python -m uv pip install --python $(BIN)/python --quiet --require-hashes -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

quick: check  ## check, then the unit tests: for the loop of a developer, in three minutes
	$(PYTEST) tests/unit

test: setup  ## check, then all tests; those that speak to the server once more on 17, on 16, and on 15 where it is installed
	@$(MAKE) --no-print-directory --jobs=2 check classes servers
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-18 test-17 test-16 test-15

classes: setup
	@$(BIN)/python tests/fixtures/class_archive.py

servers: setup  ## the object stores that tests start, and an environment with dbt and notebooks, in .servers, and jars for S3 and Azure; needs Go and Node
	@$(BIN)/python tests/servers/install.py
	@$(BIN)/python -m headwater.jars --s3 --azure

test-18: classes servers
	$(PYTEST)

# Beside test-18 under `make test`, one after the other. To a store, and to Spark, the server's version makes no difference.
test-17 test-16 test-15: WORKERS = 1
test-17 test-16 test-15: export HEADWATER_TEST_EACH = disk

test-17: classes
	HEADWATER_TEST_POSTGRES=17 $(PYTEST) $(ON_17)

test-16: classes
	HEADWATER_TEST_POSTGRES=16 $(PYTEST) $(ON_16)

test-15: classes
	@if [ -x /usr/lib/postgresql/15/bin/postgres ]; then set -x; HEADWATER_TEST_POSTGRES=15 $(PYTEST) -m "not spark" $(ON_15); \
	else echo "PostgreSQL 15 is not installed: its part of the tests is left out"; fi

soak: setup servers  ## jobs started together and killed (ROUNDS=100), slices in Airflow, random operations and logs: SEEDS=20 seeds, or the one of SEED=; power cuts and killed jobs: CUTS=200; a store that fails: BAD_DAYS=500
	$(BIN)/python tests/soak/drivers_together.py --rounds $(ROUNDS) $(if $(SEED),--only $(SEED))
	HEADWATER_SOAK=1 HEADWATER_SOAK_SEEDS=$(CUTS) $(if $(SEED),HEADWATER_SEED=$(SEED)) $(BIN)/python -m pytest --timeout=0 -n 2 --dist load $(PYTEST_ARGS) \
		$(call named,power_cut killed_jobs)
	HEADWATER_SOAK=1 HEADWATER_SOAK_SEEDS=$(BAD_DAYS) $(if $(SEED),HEADWATER_SEED=$(SEED)) $(BIN)/python -m pytest --timeout=0 -n 4 --dist load $(PYTEST_ARGS) \
		$(call named,store_faults)
	HEADWATER_SOAK=1 HEADWATER_SOAK_SEEDS=$(SEEDS) $(if $(SEED),HEADWATER_SEED=$(SEED)) $(BIN)/python -m pytest --timeout=0 $(PYTEST_ARGS) \
		$(call named,slices random_operations net_effect marks every_change large_values)

bench: setup  ## the figures of docs/benchmarks.md, each beside its reference: measured, kept, and put into the pages
	$(BIN)/python tests/benchmarks/run.py
