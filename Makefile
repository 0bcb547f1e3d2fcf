# Every target does the install steps it needs, in .venv, and does them once. `make` alone lists the targets.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
NATIVE ?= 1
export HOTROW_NATIVE := $(NATIVE)
# As on an older processor: hotrow's kernels, and torch's, keep to this instruction set.
ISA ?= $(HOTROW_ISA)
export HOTROW_ISA := $(ISA)

PACKAGES := pyproject.toml constraints.txt scripts/install.py
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*.cpp native/*.h native/include/hotrow/*.h)
# If the native module is built already, NATIVE=0 leaves it alone: HOTROW_NATIVE=0 switches it off at run time.
CORE := $(if $(filter 0,$(NATIVE)),$(or $(wildcard $(VENV)/.core-1),$(VENV)/.core-0),$(VENV)/.core-1)
PYTEST := $(BIN)/python -m pytest
# Test files run in parallel and share the cores, so threads that wait sleep. ARGS='-n 0' runs them one after another.
# Compiled modules are kept, also where the caller's environment says otherwise: tests start dozens of interpreters.
SIDE_BY_SIDE := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal
ISA_TESTS := tests/laws/test_kernels.py tests/laws/test_kernels_truth.py tests/laws/test_dense.py tests/laws/test_resume.py
# Tools are run through Python: if .venv sees the caller's packages, their scripts are in the caller's bin.
RUFF := $(BIN)/python -m ruff
CLANG_FORMAT := $(BIN)/python -c 'from clang_format import clang_format; clang_format()'
PYTHON_FILES := src tests benchmarks scripts examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-isas test-package test-all sanitize lint format bench docs build size clean preflight

help: ## print this list
	@echo 'hotrow: recommendation models whose tables are larger than memory. Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo 'Variables:'
	@printf '  %-19s%s\n' NATIVE=0 'no compiler: use the reference kernels' ISA=avx2 'or baseline: run as on an older processor' \
	  PYTHON=python3.12 'the Python to install into .venv' 'DATA= LABEL= TIME=' 'make demo: your own logs' \
	  DEMO= "make demo: more options, such as '--schema FILE --split random --set train.epochs=2'" \
	  ARGS= 'make test: options for pytest, such as "-k lookup -x"' \
	  'DLRM= FOLDER=' 'make bench: a checkout of facebookresearch/dlrm, and a disk to measure'

demo: $(VENV)/.run $(CORE) ## train a DLRM on synthetic clicks, or your own logs: DATA=path LABEL=column [TIME=column]
	@$(BIN)/hotrow $(if $(DATA),fit '$(DATA)',demo) $(if $(LABEL),--label '$(LABEL)') $(if $(TIME),--time '$(TIME)') $(DEMO)
	@echo '(hotrow is $(BIN)/hotrow; on your path after: . $(BIN)/activate)'

test: $(VENV)/.test $(CORE) ## run the tests, except the slow ones and those of test-package
	@$(SIDE_BY_SIDE) -m 'not slow and not package' $(ARGS)

test-isas: $(VENV)/.test $(CORE) ## run the kernels' law tests and a training test under every instruction set of this machine
	@for isa in $$($(BIN)/python -c 'from hotrow.kernels import ops; print(*ops.isas())'); do \
	  echo "instruction set $$isa" && HOTROW_ISA=$$isa $(SIDE_BY_SIDE) -q $(ISA_TESTS) $(ARGS) || exit; done

test-package: $(VENV)/.test $(CORE) ## run the tests of what is around the library: installation, README, tutorial, examples, benchmarks
	@$(SIDE_BY_SIDE) -m 'not slow and package' $(ARGS)

test-all: $(VENV)/.test $(CORE) ## run all tests
	@$(PYTEST) $(ARGS)

sanitize: $(VENV)/.test $(VENV)/.core-1 ## test the native code for bad addresses and undefined behaviour; ARGS=--thread: for data races; --tiles: on emulated AMX
	@$(BIN)/python scripts/sanitize.py $(ARGS)

lint: $(VENV)/.dev ## check style and types (ruff, mypy --strict, clang-format); changes nothing
	@$(RUFF) check $(wildcard $(PYTHON_FILES))
	@$(RUFF) format --check $(wildcard $(PYTHON_FILES))
	@$(BIN)/python -m mypy
	@$(CLANG_FORMAT) --dry-run -Werror $$(git ls-files 'native/*.cpp' 'native/*.h' 'tests/*.h')

format: $(VENV)/.dev ## fix style in place (ruff, clang-format)
	@$(RUFF) check --fix $(wildcard $(PYTHON_FILES))
	@$(RUFF) format $(wildcard $(PYTHON_FILES))
	@$(CLANG_FORMAT) -i $$(git ls-files 'native/*.cpp' 'native/*.h' 'tests/*.h')

bench: $(VENV)/.bench $(CORE) ## measure against every peer (14 GB of RAM, 20 GB of disk, 2 hours) and rewrite the figures in README and docs
	@$(BIN)/python -m benchmarks.kernels --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.updates --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.overlap --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.end_to_end --out docs/measurements/benchmarks.json $(if $(DLRM),--dlrm '$(DLRM)')
	@$(BIN)/python -m benchmarks.micro_batches --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.step_profile --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.peak_memory --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.parse --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.parquet_encode --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.block_store --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.tiers --out docs/measurements/benchmarks.json $(if $(FOLDER),--folder '$(FOLDER)')
	@$(BIN)/python -m benchmarks.hot --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.ranks --out docs/measurements/benchmarks.json
	@$(BIN)/python -m benchmarks.claims

docs: $(VENV)/.dev ## write the documentation as HTML into site/; fails on a dead link
	@$(BIN)/python scripts/docs.py site

build: $(VENV)/.run ## build a wheel in dist/
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist

size: ## print lines by file, largest first
	@git ls-files '*.py' '*.cpp' '*.h' | xargs wc -l | sort -rn

clean: ## remove .venv, build, dist, site and caches; keeps runs and data
	@rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Prints nothing if everything is installed; otherwise names what is missing and how to get it.
preflight:
	@[ -e $(VENV)/.made ] && [ -e $(CORE) ] || scripts/preflight > /dev/null

$(VENV)/.made: | preflight
	@python=$$(scripts/preflight 2> /dev/null) && "$$python" scripts/install.py venv
	@touch $@

$(VENV)/.run: $(PACKAGES) | $(VENV)/.made
	@$(BIN)/python scripts/install.py packages tensorboard
	@touch $@

$(VENV)/.test $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: $(VENV)/.run
	@$(BIN)/python scripts/install.py packages $*
	@touch $@

$(VENV)/.core-0 $(VENV)/.core-1: $(SOURCES) $(VENV)/.run | preflight
	@$(BIN)/python scripts/install.py core
	@rm -f $(VENV)/.core-0 $(VENV)/.core-1
	@touch $@
