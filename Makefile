# make setup | make demo | make test | make soak | make dist
# PYTHON=...           the Python (3.11 to 3.13) that the virtual environment is made from
# TORCH_INDEX_URL=...  a package index that holds PyTorch's smaller CPU wheels
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# A test run starts hundreds of processes: keep Python's bytecode cache, even if the environment disables it.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)

.PHONY: setup demo test check lint types soak dist

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Manta needs Python 3.11, 3.12 or 3.13; none was found. Set PYTHON=/path/to/python3." >&2; exit 1; }
	@echo "Setting up $(VENV) (once; a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -z "$(TORCH_INDEX_URL)" || $(BIN)/python -m pip install -q --disable-pip-version-check \
		--index-url "$(TORCH_INDEX_URL)" $$(grep '^torch==' requirements.lock)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src/manta/*/ benchmarks
	@touch $(STAMP)

demo: setup
	@$(BIN)/python -P -m manta.api.demo

check: lint types

# Lint, format and the layer rule.
lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

types: setup
	@$(BIN)/mypy

# PYTEST_OPTIONS=... is passed to pytest. Three processes, since tests of whole services spend time waiting.
# Types are checked at low priority meanwhile, and type errors are printed at the end.
test: lint
	@types=$$(mktemp) && trap 'rm -f $$types' EXIT; \
	nice -n 19 $(BIN)/mypy >$$types 2>&1 & checker=$$!; \
	$(BIN)/python -m pytest -n 3 --dist loadfile $(PYTEST_OPTIONS); tests=$$?; \
	wait $$checker; checked=$$?; test $$checked = 0 || cat $$types; test $$tests = 0 -a $$checked = 0

# Exhaustive tests that take long: every pair of layouts, many seeds, whole services under rarer failures, upgrades,
# small benchmarks, 60 random fault schedules.
soak: setup
	@$(BIN)/python -m pytest --soak $(PYTEST_OPTIONS)
	@$(BIN)/python -m benchmarks.chaos --schedules 60 --json

# dist/: the wheel, built from the sdist; the sdist; and the tested versions of dependencies, for `pip install -c`.
# Times in the archives are those of the commit, so that builds are reproducible.
dist: setup
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 0) \
		$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@cp requirements.lock dist/constraints.txt
	@ls -1 dist
