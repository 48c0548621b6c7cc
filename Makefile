# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint typecheck pytest coverage slow fuzz census clean

demo: .venv/.demo
	$(BIN)/gfsa demo

test: lint typecheck pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/.dev
	$(BIN)/mypy

pytest: .venv/.dev
	$(BIN)/pytest -n 2

# what `pytest` leaves out: training runs and whatever else takes minutes
slow: .venv/.dev
	$(BIN)/pytest -m slow

# more corrupted filter files than the tests try, and longer sequences of plug, save, load …
fuzz: .venv/.dev
	GFSA_FUZZ=20000 $(BIN)/pytest tests/scale/test_corrupted_filters.py tests/scale/test_any_order.py

# every model type of transformers and timm against a dense reference; writes docs/supported.md
census: .venv/.dev
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m census.run --processes 2 --write

coverage: .venv/.dev
	$(BIN)/pytest -n 2 --cov --cov-report=term-missing

.venv/bin/python:
	$(PYTHON) -m venv .venv

PROJECTS := pyproject.toml experiments/pyproject.toml benchmarks/pyproject.toml constraints.txt

.venv/.demo: .venv/bin/python $(PROJECTS)
	$(BIN)/pip install -q -c constraints.txt -e . -e ./experiments
	touch $@

.venv/.dev: .venv/bin/python $(PROJECTS)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]' -e './experiments[all]' -e ./benchmarks
	touch $@ .venv/.demo

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis gfsa-demo
