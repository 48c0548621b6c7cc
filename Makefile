# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint typecheck pytest coverage slow clean

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

coverage: .venv/.dev
	$(BIN)/pytest -n 2 --cov --cov-report=term-missing

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[demo]'
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/.demo

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis gfsa-demo
