# Two commands are enough on a fresh machine: `make demo` and `make test`.
# Each builds an environment from the pinned constraints the first time and reuses it afterwards:
# .venv-demo has what the demonstration needs, .venv what a developer needs.
# `make test` is what a change needs, in minutes; `make test-all` runs the remaining tests.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO_VENV  := .venv-demo
DEMO_STAMP := $(DEMO_VENV)/.installed
WORKERS ?= 2
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

.PHONY: demo test test-all lint types docs format bench clean

demo: $(DEMO_STAMP)
	$(DEMO_VENV)/bin/wsam demo --out demo

test: lint types
	$(PYTEST) -m "not slow and not browser"

test-all: $(STAMP)
	@command -v chromium >/dev/null 2>&1 || echo "no chromium on PATH: the browser tests will be skipped"
	$(PYTEST) -m "slow or browser"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/wsam bench

clean:
	rm -rf $(VENV) $(DEMO_VENV) demo dist docs/_build docs/gallery .pytest_cache .mypy_cache .ruff_cache

# torch first and alone: the pinned CPU build must be in place before anything asks for "torch".
INSTALL = $(@D)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt

$(STAMP): EXTRAS := dev
$(DEMO_STAMP): EXTRAS := lab
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(INSTALL) torch numpy
	$(INSTALL) -e '.[$(EXTRAS)]'
	touch $@
