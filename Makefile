# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint typecheck pytest coverage slow fuzz census engines examples clean

demo: .venv/.demo
	$(BIN)/gfsa demo

test: lint typecheck pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/.dev
	$(BIN)/mypy

pytest: .venv/.dev
	$(BIN)/pytest -n 2 --dist worksteal

# what `pytest` leaves out: training runs and whatever else takes minutes
slow: .venv/.dev
	$(BIN)/pytest -m slow

# more corrupted filter files than the tests try, and longer sequences of plug, save, load …
fuzz: .venv/.dev
	GFSA_FUZZ=20000 $(BIN)/pytest tests/scale/test_hostile_files.py tests/scale/test_any_order.py

# every model type of transformers and timm against a dense reference; writes docs/supported.md
census: .venv/.dev
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m census.run --processes 2 --write

# vLLM, torchtitan, DeepSpeed …, each in .venv-engines/NAME; writes docs/engines.md. One: ENGINES=vllm
engines: .venv/.dev
	cd tests && ../$(BIN)/python -m engines.run --write $(ENGINES)

# every example and notebook as a reader runs it, with its defaults
examples: .venv/.dev
	$(BIN)/pytest tests/examples -m "slow or not slow" --durations=0

coverage: .venv/.dev
	$(BIN)/pytest -n 2 --cov --cov-report=term-missing

.venv/bin/python:
	$(PYTHON) -m venv .venv

PROJECTS := pyproject.toml experiments/pyproject.toml benchmarks/pyproject.toml constraints.txt

.venv/.demo: .venv/bin/python $(PROJECTS)
	$(BIN)/pip install -q -c constraints.txt -e . -e ./experiments
	touch $@

# pip compiles 20,000 files one after another, compileall on all cores; templates among them fail
.venv/.dev: .venv/bin/python $(PROJECTS)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]' -e './experiments[all]' -e ./benchmarks
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@ .venv/.demo

clean:
	rm -rf .venv .venv-docs .venv-release .venv-engines build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis gfsa-demo

# the site, from the repository's own Markdown; a warning is an error. Needs Python 3.11 or newer, no torch
.PHONY: docs docs-serve docs-browser release clean-tree
DOCS := .venv-docs/bin
# the tools of an extra without the package itself
EXTRA := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")

docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict

docs-serve: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs serve

# the built site and a page of the lens in Chromium
docs-browser: docs .venv/.dev
	$(BIN)/pytest tests/docs/test_site_in_browser.py tests/lens/test_page.py

.venv-docs/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/python -c '$(EXTRA)' docs > .venv-docs/requirements.txt
	$(DOCS)/pip install -q -c constraints.txt -r .venv-docs/requirements.txt
	touch $@

# wheel and sdist of gfsa in dist/, checked; refuses a tree with changes that are not committed
release: clean-tree .venv-release/.release
	rm -rf dist build/lib
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/twine check --strict dist/*
	.venv-release/bin/python .ci/check_distributions.py dist

clean-tree:
	@test -z "$$(git status --porcelain)" || { git status --short; \
		echo "make release: commit or stash these changes first" >&2; exit 1; }

.venv-release/.release: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install -q -c constraints.txt build twine
	touch $@
