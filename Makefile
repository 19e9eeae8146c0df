# Every target sets up .venv by itself (scripts/setup.sh); FLOWALIGN_PYTHON picks the interpreter.
PY := .venv/bin/python

.PHONY: test test-all test-long demo check docs notebooks lock setup clean

# One worker a core, each with one thread (tests/conftest.py).
PYTEST := $(PY) -m pytest -q -n logical --maxprocesses 8 --dist worksteal

test: setup
	$(PYTEST)

# The slow ones, too: several processes, compiled models, a second device.
test-all: setup
	$(PYTEST) -m "not long and not gpu"

# The longest: kills, damage, the first day, notebooks, the site, statistics of many draws, generated code.
test-long: setup
	$(PYTEST) -m long

demo: setup
	$(PY) -m flowalign.commands.cli train --config configs/tiny/demo.yaml

check: setup
	$(PY) -m ruff check .
	$(PY) -m pyright

# site/index.html, which opens without a server. The variable keeps a notice of the theme's makers quiet.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Runs notebooks/*.ipynb and saves their outputs, which readers on a web host see.
notebooks: setup
	$(PY) scripts/run_notebooks.py

# What is installed in .venv, for setup.sh and Dockerfile.
lock: setup
	{ grep '^#' requirements.lock; \
	  { $(PY) -m pip freeze --exclude-editable; $(PY) -m pip freeze --path .venv/open_clip; } | \
	  grep -Ev '^(#|torch(vision)?==)' | sort -fu; } >requirements.new
	mv requirements.new requirements.lock

setup:
	@sh scripts/setup.sh

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
