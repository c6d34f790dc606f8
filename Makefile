# actorsub: everything a newcomer or CI runs. `make help` lists it.
#
# `make demo` and `make test` are the only two that need nothing before them: each makes the virtual environment in
# .venv, builds the source distribution, builds the wheel from that, installs the wheel, and runs against the installed
# package, never against this folder. A stamp per step keeps a second run short.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
CORE_SOURCES := $(wildcard csrc/*.h csrc/*.cc actorsub/_cpp/*.pxd actorsub/*.pyx actorsub/_pyx/*)
SOURCES := setup.py pyproject.toml MANIFEST.in README.md $(CORE_SOURCES) $(wildcard actorsub/*.py actorsub/*.pyi actorsub/*/*.py)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CMAKE_BUILD := build/cpp
comma := ,

.PHONY: help demo test campaign bench comparison lint format dist build-cpp test-cpp test-sanitizers install-versions list-versions test-versions install-pythons list-pythons test-pythons wheels test-wheels fuzz bench-cpp develop clean

help:  ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- build and install -------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@command -v g++ >/dev/null || { echo "actorsub needs a C++17 compiler: install g++ (Debian: apt-get install g++)"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON); choose a Python with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "actorsub needs Python 3.10 or newer; choose one with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || { echo "$(PYTHON) has no C headers (Debian: apt-get install python3-dev)"; exit 1; }
	@echo "Making the virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip build
	@touch $@

# The wheel comes from the sdist, so that an incomplete sdist shows here.
$(VENV)/.wheel: $(VENV)/.made $(SOURCES)
	@echo "Building the sdist, and the wheel from it (about a minute)"
	@rm -rf build/lib* build/bdist* $(VENV)/wheel
	@mkdir -p build dist
	@$(BIN)/python -m build --outdir $(VENV)/wheel . > build/dist.log 2>&1 || { tail -n 40 build/dist.log; exit 1; }
	@cp $(VENV)/wheel/* dist/
	@ls $(VENV)/wheel
	@touch $@

$(VENV)/.installed-%: $(VENV)/.wheel
	@echo "Installing the wheel with its extra '$*' (Ray is a large download)"
	@$(PIP) install "$$(ls $(VENV)/wheel/*.whl)[$*]"
	@$(PIP) install --force-reinstall --no-deps $(VENV)/wheel/*.whl
	@touch $@

dist: $(VENV)/.wheel  ## Build dist/*.tar.gz and, from it, dist/*.whl

# --- the two commands --------------------------------------------------------------------------------------------------

demo: $(VENV)/.installed-demo  ## What stock Ray costs a service while actors restart, and what it costs with actorsub
	@$(BIN)/actorsub demo $(DEMO_ARGS)

test: $(VENV)/.installed-test  ## The Python tests, on a real Ray, against the installed wheel
	@# From tests/: Ray puts the folder that a driver was started in on the path of its workers, and the sources are no package.
	@cd tests && $(abspath $(BIN))/pytest -c ../pyproject.toml --rootdir=.. . $(PYTEST_ARGS)

# Those that tell whether a Ray is understood; the rest on other versions: make test-versions VERSION_TESTS=.
CORE_TESTS := test_compat.py test_errors.py test_signatures.py test_refusal.py
RAY_VERSIONS ?= 2.49.2 2.54.1
VERSION_TESTS ?= $(CORE_TESTS)
RAY_STAMPS := $(foreach version,$(RAY_VERSIONS),$(VENV)-ray-$(version)/.installed)
$(VENV)-ray-%/.installed: $(VENV)/.wheel
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install "$$(ls $(VENV)/wheel/*.whl)[test]" "ray==$*"
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --force-reinstall --no-deps $(VENV)/wheel/*.whl
	@touch $@

install-versions: $(RAY_STAMPS)

list-versions:
	@echo $(RAY_VERSIONS)

test-versions: install-versions  ## The core of the tests on older Rays (RAY_VERSIONS), each in a virtual environment of its own
	@for version in $(RAY_VERSIONS); do \
	    echo "Ray $$version"; \
	    (cd tests && $(abspath $(VENV))-ray-$$version/bin/python -m pytest -c ../pyproject.toml --rootdir=.. $(VERSION_TESTS) $(PYTEST_ARGS)) || exit 1; \
	done

# One interpreter for each minor version that actorsub supports: pyenv's newest, else the one on the PATH.
MINORS := 10 11 12 13 14
PYTHONS ?= $(shell for minor in $(MINORS); do \
    { ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor.*/bin/python 2>/dev/null | sort -V | tail -n 1; \
      command -v python3.$$minor 2>/dev/null; } | head -n 1; done)
# For a part of the suite: make test-pythons PYTHON_TESTS="test_lifetime.py test_sessions.py"
PYTHON_TESTS ?= .

list-pythons:
	@for python in $(PYTHONS); do echo "$$python"; done
	@for minor in $(MINORS); do \
	    for python in $(PYTHONS); do $$python -c "import sys; sys.exit(sys.version_info[:2] == (3, $$minor))" || continue 2; done; \
	    echo "skipped: there is no CPython 3.$$minor here" >&2; done

# Each builds the wheel anew, from the sdist, with its own headers. An interpreter that Ray has no wheel for is skipped.
install-pythons: $(VENV)/.wheel
	@for python in $(PYTHONS); do \
	    version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); venv=$(VENV)-py$$version; \
	    test $$venv/.installed -nt $(VENV)/.wheel && continue; \
	    echo "Building the wheel for CPython $$version and installing it with Ray"; \
	    rm -rf $$venv/wheel; test -x $$venv/bin/python || $$python -m venv $$venv || exit 1; \
	    pip="$$venv/bin/python -m pip --disable-pip-version-check --quiet"; \
	    $$pip install --upgrade pip || exit 1; \
	    $$pip download --no-deps --dest $$venv/ray ray >$$venv/ray.log 2>&1 \
	        || { echo "skipped: Ray has no wheel for CPython $$version"; continue; }; \
	    $$pip wheel --no-deps --wheel-dir $$venv/wheel $(VENV)/wheel/*.tar.gz || exit 1; \
	    $$pip install "$$(ls $$venv/wheel/*.whl)[test]" && $$pip install --force-reinstall --no-deps $$venv/wheel/*.whl || exit 1; \
	    rm -rf $$venv/ray; touch $$venv/.installed; \
	done

test-pythons: install-pythons list-pythons  ## The tests on every Python that this machine has (PYTHONS, PYTHON_TESTS)
	@for python in $(PYTHONS); do \
	    version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); venv=$(abspath $(VENV))-py$$version; \
	    test -e $$venv/.installed || continue; \
	    echo "CPython $$version"; \
	    (cd tests && $$venv/bin/python -m pytest -c ../pyproject.toml --rootdir=.. $(PYTHON_TESTS) $(PYTEST_ARGS)) || exit 1; \
	done

$(VENV)/.wheel-tools: $(VENV)/.made
	@$(PIP) install 'ziglang>=0.15' 'auditwheel>=6.4' 'wheel>=0.45'
	@touch $@

wheels: $(VENV)/.wheel $(VENV)/.wheel-tools  ## The wheels to publish in dist/wheels: each Python here, x86_64 and aarch64, glibc 2.17
	@$(BIN)/python tools/wheels.py build $(VENV)/wheel/*.tar.gz dist/wheels $(PYTHONS)

test-wheels: $(VENV)/.wheel-tools  ## Each of them that can run here, installed in an empty environment and used
	@$(BIN)/python tools/wheels.py test dist/wheels $(PYTHONS)

# --- for developers ----------------------------------------------------------------------------------------------------

bench: $(VENV)/.installed-bench  ## Benchmarks against stock and tuned Ray: pytest-benchmark's JSON and a table of ratios
	@mkdir -p bench/out
	@cd bench && $(abspath $(BIN))/pytest -c ../pyproject.toml --rootdir=.. . --benchmark-json=out/benchmark.json $(PYTEST_ARGS)
	@$(BIN)/python bench/table.py bench/out/benchmark.json

COMPARISON_ARGS ?=
comparison: $(VENV)/.installed-comparison  ## One HTTP service written in seven ways while its workers are killed (15 minutes; VENV=.venv-comparison)
	@mkdir -p bench/out
	@cd bench && $(abspath $(BIN))/python comparison.py --json out/comparison.json --picture out/comparison.png $(COMPARISON_ARGS)

SECONDS ?= 60
SEED ?= 1
CAMPAIGN_ARGS ?=
campaign: $(VENV)/.installed-test  ## Ledgered calls while everything is disturbed: SECONDS=, SEED=, CAMPAIGN_ARGS="--without kill,rst"
	@cd tests && $(abspath $(BIN))/python -m campaign --seconds $(SECONDS) --seed $(SEED) $(CAMPAIGN_ARGS)

SANITIZED := -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DACTORSUB_SANITIZE=
# $(call build_cpp,folder,cmake's arguments)
build_cpp = cmake -S csrc -B $(CMAKE_BUILD)/$(1) $(2) > /dev/null && cmake --build $(CMAKE_BUILD)/$(1) -j $(JOBS)

.PHONY: cpp-plain cpp-sanitizers cpp-fuzz cpp-bench
cpp-plain:
	@$(call build_cpp,plain,-DCMAKE_BUILD_TYPE=RelWithDebInfo)
cpp-sanitizers:
	@$(call build_cpp,thread,$(SANITIZED)thread)
	@$(call build_cpp,address,$(SANITIZED)address$(comma)undefined)
cpp-fuzz:
	@$(call build_cpp,fuzz,$(SANITIZED)address$(comma)undefined -DACTORSUB_FUZZ=ON -DACTORSUB_TESTS=OFF)
cpp-bench:
	@$(call build_cpp,bench,-DCMAKE_BUILD_TYPE=Release -DACTORSUB_BENCH=ON -DACTORSUB_TESTS=OFF)
build-cpp: cpp-plain cpp-sanitizers cpp-fuzz cpp-bench  ## Everything that the next four run

test-cpp: cpp-plain  ## The C++ tests, without Python (needs cmake and doctest)
	@ctest --test-dir $(CMAKE_BUILD)/plain --output-on-failure -j $(JOBS)

test-sanitizers: cpp-sanitizers  ## The C++ tests under TSan, and under ASan with UBSan (needs clang)
	@ctest --test-dir $(CMAKE_BUILD)/thread --output-on-failure -j $(JOBS)
	@ctest --test-dir $(CMAKE_BUILD)/address --output-on-failure -j $(JOBS)

FUZZ_SECONDS ?= 20
fuzz: cpp-fuzz  ## Each fuzzer for FUZZ_SECONDS (needs clang)
	@for fuzzer in $(CMAKE_BUILD)/fuzz/*_fuzz; do \
	    name=$$(basename $$fuzzer _fuzz); corpus=$(CMAKE_BUILD)/corpus/$$name; log=$(CMAKE_BUILD)/$$name.log; \
	    mkdir -p $$corpus; seeds=$$(ls -d tests/cpp/fuzz/seeds/$$name 2>/dev/null); \
	    $$fuzzer -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 $$corpus $$seeds > $$log 2>&1 \
	        || { tail -n 40 $$log; exit 1; }; \
	    echo "$$name: $$(grep number_of_executed_units $$log | tr -s ' ') in $(FUZZ_SECONDS) s, nothing found"; \
	done

BENCH_CPP_ARGS ?=
bench-cpp: cpp-bench  ## The C++ benchmarks (needs google-benchmark)
	@for bench in $(CMAKE_BUILD)/bench/*_bench; do $$bench $(BENCH_CPP_ARGS) || exit 1; done

lint: $(VENV)/.linters  ## ruff, mypy, stubtest, cython-lint, clang-format, clang-tidy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PATH=$(abspath $(BIN)):$$PATH cython-lint --max-line-length=120 actorsub/_core.pyx actorsub/_pyx/*.pxi actorsub/_cpp/*.pxd
	@$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'actorsub/_pyx/*.h' 'csrc/*.h' 'csrc/*.cc' 'tests/cpp/*.h' 'tests/cpp/*.cc' 'bench/cpp/*.cc')
	@$(BIN)/mypy
	@$(BIN)/stubtest --mypy-config-file pyproject.toml actorsub._core
	@cmake -S csrc -B $(CMAKE_BUILD)/plain -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > /dev/null
	@$(BIN)/clang-tidy --quiet -p $(CMAKE_BUILD)/plain $$(git ls-files 'csrc/*.cc')

format: $(VENV)/.linters  ## Format everything
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $$(git ls-files 'actorsub/_pyx/*.h' 'csrc/*.h' 'csrc/*.cc' 'tests/cpp/*.h' 'tests/cpp/*.cc' 'bench/cpp/*.cc')

$(VENV)/.linters: $(VENV)/.installed-test pyproject.toml
	@$(PIP) install "$$(ls $(VENV)/wheel/*.whl)[lint]"
	@touch $@

develop: $(VENV)/.made  ## Build the core in place, warnings as errors; then `PYTHONPATH=. .venv/bin/pytest tests`
	@$(PIP) install 'setuptools>=77' 'cython>=3.1' && ACTORSUB_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace

clean:  ## Remove everything that was built, the virtual environment too
	@rm -rf build dist *.egg-info .venv .venv-ray-* .venv-py* bench/out actorsub/*.so
