# Everything runs in a virtual environment of the checkout; python3 (3.11 or newer) and make are all that is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-all coverage check budget dump bench soak docs site clean
help: ## Show the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pgoutbox needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[all,testing]' --group dev --group bench
	touch $@

demo: $(STAMP) ## Play a sign-up service against an embedded PostgreSQL and a local SMTP server
	$(BIN)/pgoutbox demo

# The tests start hundreds of programs: without bytecode, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
test: $(STAMP) ## Run the tests that are not slow, on the embedded PostgreSQL or on PGOUTBOX_TEST_DSN
	$(PYTEST) -m 'not slow'

# The budget counts alone: beside other tests claims become smaller, and each message then costs more.
test-all: $(STAMP) ## Run all tests, as CI does
	$(BIN)/python -m pytest tests/budget
	$(PYTEST) --ignore=tests/budget

coverage: export COVERAGE_FILE := $(CURDIR)/.coverage-data/coverage
coverage: $(STAMP) ## Run all tests and show the coverage of each module
	rm -rf .coverage-data
	mkdir .coverage-data
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(PYTEST); code=$$?; \
	$(BIN)/python -m coverage combine --quiet && \
	$(BIN)/python -m coverage report; exit $$code

# The function comes first: the database from which the pages are made has it.
GENERATED := migrations/sql/functions/_redacted_text.sql docs/reference/*.md docs/explanation/core.md
COG := $(BIN)/cog -P -p 'from tools import reference' --verbosity 1

# The type checkers are the slowest checks and use one core each.
CHECKS := check-format check-lint check-mypy check-pyright check-layers check-english check-pages check-links check-docs check-commits check-tests
.PHONY: $(CHECKS)
check: $(STAMP) ## Check format, lint, types, layers, plain English, pages, links, generated parts, commit subjects, and that tests can be collected
	@$(MAKE) --no-print-directory --jobs 2 $(CHECKS)

check-format:
	$(BIN)/ruff format --check .
check-lint:
	$(BIN)/ruff check .
check-mypy:
	$(BIN)/mypy
check-pyright:
	$(BIN)/pyright --pythonpath $(BIN)/python
check-layers:
	$(BIN)/lint-imports
check-english:
	$(BIN)/python -m tools.plain_english
check-pages:
	$(BIN)/python -m tools.pages
check-links:
	$(BIN)/rumdl check --quiet .
check-docs:
	$(COG) --check --diff --check-fail-msg 'run make docs' $(GENERATED)
# The newest 50 commits. An unpacked archive has none, and a shallow clone one, without a range: error 3.
check-commits:
	@! git rev-parse --quiet --verify HEAD >/dev/null 2>&1 || $(BIN)/cz --no-raise 3 check --message-length-limit 72 \
		--rev-range "$$(git rev-list --max-count=51 HEAD | tail -n 1)..HEAD"
# It also compiles the tests once. Otherwise each process of a first `make test-all` would compile all of them.
check-tests:
	@output=$$($(BIN)/python -m pytest --collect-only -qq) || { echo "$$output"; exit 1; }

budget: $(STAMP) ## Count what a message costs, and write the budget that CI compares
	$(BIN)/python -m tests.budget --write

dump: $(STAMP) ## Freeze the schema with messages in all states as the dump of the next release, which later revisions must bring forward
	$(BIN)/python -m tests.frozen

bench: $(STAMP) ## Measure, side by side, and print ratios
	$(BIN)/python -m benchmarks

MINUTES ?= 20
FAILOVERS ?= 3
EXAMPLES ?= 300
soak: $(STAMP) ## Shoot at producers, workers and PostgreSQL for MINUTES (SEED=n to choose the shots), then FAILOVERS, then EXAMPLES random histories
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --failovers $(FAILOVERS) $(if $(SEED),--seed $(SEED))
	PGOUTBOX_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/worker/test_state_machine.py

docs: $(STAMP) ## Bring the generated parts of docs up to date, and the SQL function of redaction
	$(COG) -r $(GENERATED)

site: $(STAMP) ## Build the documentation site in build/site
	$(BIN)/python -m tools.site

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .bench-cache .coverage-data .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
