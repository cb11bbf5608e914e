# Every target sets up `.venv` on first use and leaves it alone afterwards.
# Needs: Python 3.11 or newer with venv, make, a C++ compiler.

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check format docs clean

help:
	@echo "make demo    train a small model in three arms; writes a table, a picture and a trace"
	@echo "make test    the whole test suite"
	@echo "make check   lint, format, types"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    the documentation, in docs/_build/html"
	@echo "make clean   remove what was built (.venv stays)"

demo: $(STAMP)
	$(BIN)/penstock demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf build dist docs/_build penstock-demo .pytest_cache .ruff_cache .hypothesis .benchmarks

# The first interpreter that is new enough, whatever it is called. `make PYTHON=...` asks for one by name.
define FIND_PYTHON
for name in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	if "$$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo "$$name"; exit 0; fi; \
done; \
echo "Penstock needs Python 3.11 or newer with the venv module; python3 here is: $$(python3 --version 2>&1)." >&2; \
echo "Install one (on Debian: python3 and python3-venv) or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
exit 1
endef

# torch first: once the constrained build is there, nothing else asks for another.
$(STAMP): pyproject.toml constraints.txt
	@python=$$($(FIND_PYTHON)) || exit 1; \
	echo "Setting up .venv with $$("$$python" --version); the first time takes a few minutes."; \
	"$$python" -m venv .venv
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
