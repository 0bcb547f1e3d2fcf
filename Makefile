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
# Where the native module is built already, NATIVE=0 leaves it alone: HOTROW_NATIVE=0 switches it off at run time.
CORE := $(if $(filter 0,$(NATIVE)),$(or $(wildcard $(VENV)/.core-1),$(VENV)/.core-0),$(VENV)/.core-1)
PYTEST := $(BIN)/python -m pytest
# Test files side by side, threads that wait asleep: workers share the cores. ARGS='-n 0' runs one after another.
SIDE_BY_SIDE := OMP_WAIT_POLICY=passive $(PYTEST) -n auto --maxprocesses 4 --dist loadfile
ISA_TESTS := tests/laws/test_kernels.py tests/laws/test_kernels_truth.py tests/laws/test_dense.py tests/laws/test_resume.py
# Tools by way of Python: where .venv sees the caller's packages, their scripts lie in the caller's bin.
RUFF := $(BIN)/python -m ruff
CLANG_FORMAT := $(BIN)/python -c 'from clang_format import clang_format; clang_format()'
PYTHON_FILES := src tests benchmarks scripts examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-isas test-all sanitize lint format bench docs build size clean preflight

help: ## this list
	@echo 'hotrow: recommendation models whose tables are larger than memory. Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo 'Variables: NATIVE=0 (no compiler: reference kernels), ISA=avx2 or baseline (as on an older processor), PYTHON=python3.12, DATA= LABEL= TIME= DEMO='--schema FILE --split random --set train.epochs=2' (make demo on your own logs), DLRM= FOLDER= (make bench: a checkout, a disk)'

demo: $(VENV)/.run $(CORE) ## train a DLRM on synthetic clicks; on your own logs: make demo DATA=path LABEL=column [TIME=column]
	@$(BIN)/hotrow demo $(if $(DATA),--data '$(DATA)') $(if $(LABEL),--label '$(LABEL)') $(if $(TIME),--time '$(TIME)') $(DEMO)
	@echo '(hotrow is $(BIN)/hotrow; on your path after: . $(BIN)/activate)'

test: $(VENV)/.test $(CORE) ## the tests, but for the slow ones
	@$(SIDE_BY_SIDE) -m 'not slow' $(ARGS)

test-isas: $(VENV)/.test $(CORE) ## the kernels' laws and one training test under every instruction set of this machine
	@for isa in $$($(BIN)/python -c 'from hotrow.kernels import ops; print(*ops.isas())'); do \
	  echo "instruction set $$isa" && HOTROW_ISA=$$isa $(SIDE_BY_SIDE) -q $(ISA_TESTS) $(ARGS) || exit; done

test-all: $(VENV)/.test $(CORE) ## all tests
	@$(PYTEST) $(ARGS)

sanitize: $(VENV)/.test $(VENV)/.core-1 ## the tests of the native code under sanitizers: addresses, undefined behaviour; ARGS=--thread: data races
	@$(BIN)/python scripts/sanitize.py $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy --strict, clang-format; changes nothing
	@$(RUFF) check $(wildcard $(PYTHON_FILES))
	@$(RUFF) format --check $(wildcard $(PYTHON_FILES))
	@$(BIN)/python -m mypy
	@$(CLANG_FORMAT) --dry-run -Werror $$(git ls-files 'native/*.cpp' 'native/*.h')

format: $(VENV)/.dev ## ruff and clang-format, in place
	@$(RUFF) check --fix $(wildcard $(PYTHON_FILES))
	@$(RUFF) format $(wildcard $(PYTHON_FILES))
	@$(CLANG_FORMAT) -i $$(git ls-files 'native/*.cpp' 'native/*.h')

bench: $(VENV)/.bench $(CORE) ## measure against every peer here (14 GB of RAM, 20 GB of disk, 2 hours), and rewrite the figures of README and docs
	@$(BIN)/python -m benchmarks.kernels --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.updates --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.overlap --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.end_to_end --out docs/benchmarks.json $(if $(DLRM),--dlrm '$(DLRM)')
	@$(BIN)/python -m benchmarks.step_profile --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.peak_memory --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.parse --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.parquet_encode --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.block_store --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.tiers --out docs/benchmarks.json $(if $(FOLDER),--folder '$(FOLDER)')
	@$(BIN)/python -m benchmarks.hot --out docs/benchmarks.json
	@$(BIN)/python -m benchmarks.claims

docs: $(VENV)/.dev ## the documentation as one folder of HTML, site/; fails on a dead link
	@$(BIN)/python scripts/docs.py site

build: $(VENV)/.run ## a wheel in dist/
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist

size: ## lines by file, largest first
	@git ls-files '*.py' '*.cpp' '*.h' | xargs wc -l | sort -rn

clean: ## remove .venv, build, dist, site and caches; runs and data stay
	@rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Silent where everything is installed; names what is missing, and its cure, where it is not.
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
