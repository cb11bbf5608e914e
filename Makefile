# Every target sets up `.venv` on first use and leaves it alone afterwards; with TORCH=2.11.0, or
# TORCH=newest, an environment of its own, `.venv-torch-2.11.0`, in which everything but torch and
# Triton has the tested versions.
# Needs: Python 3.11 or newer with venv, make, a C++ compiler.

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check format docs clean

help:
	@echo "make demo    train a small model in three arms; writes a table, a picture and a trace"
	@echo "make test    the whole test suite; with TORCH=2.11.0 or TORCH=newest on another torch"
	@echo "make check   lint, format, types"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    the documentation, in docs/_build/html"
	@echo "make clean   remove what was built (environments stay)"

demo: $(STAMP)
	$(BIN)/penstock demo

# Bytecode is kept, or each worker and each process of a test would compile all sources again.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal $(TESTS)

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

# Triton goes with torch: a torch for CUDA asks for one version of it.
ifeq ($(TORCH),)
CONSTRAIN := cat
else ifeq ($(TORCH),newest)
CONSTRAIN := sed -e '/^torch==/d' -e '/^triton==/d'
else
CONSTRAIN := sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d'
endif

# torch first: once the constrained build is there, nothing else asks for another.
$(STAMP): pyproject.toml constraints.txt
	@python=$$($(FIND_PYTHON)) || exit 1; \
	echo "Setting up $(VENV) with $$("$$python" --version); the first time takes a few minutes."; \
	"$$python" -m venv $(VENV)
	@$(CONSTRAIN) constraints.txt > $(VENV)/constraints.txt
	$(PIP) install --quiet -c $(VENV)/constraints.txt torch
	$(PIP) install --quiet -c $(VENV)/constraints.txt -e ".[dev]"
	@touch $@
