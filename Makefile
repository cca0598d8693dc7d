# make demo   convert the small model that ships with the project and ask it three questions and about a picture
# make test   the test suite
# make lint   style and types
# make bench  speed of the small model on this machine
# make clean  remove everything that was made
#
# Needs Python 3.10 or newer with venv, a C++20 compiler, git and make; everything else is installed into .venv.
PYTHON ?= python3
PYTEST_ARGS ?=
EXTRAS ?= test,lint

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation
TEST_BUILD := --config-settings=build-dir=build/test --config-settings=cmake.define.DELTA_TESTS=ON
SOURCES := $(shell find csrc deltallama conversion gguf-py -type f -not -name '*.pyc' -not -name _cdef.py) \
	CMakeLists.txt pyproject.toml convert_hf_to_gguf.py
MODEL := build/kimi-k3-nano-q8_0.gguf

.PHONY: demo test test-torch lint bench clean
.NOTPARALLEL: # every step is parallel in itself, and two pips must not write one environment
.DELETE_ON_ERROR:

demo: $(VENV)/.package
	$(RUN) models/demo.py $(MODEL)

test: $(VENV)/.tests
	$(RUN) -m pytest $(PYTEST_ARGS)

test-torch: $(VENV)/.torch
	$(RUN) -m pytest -m torch $(PYTEST_ARGS)

lint: $(VENV)/.tests
	$(RUN) -m ruff check .
	$(RUN) -m mypy

bench: $(VENV)/.package
	$(RUN) models/demo.py --convert-only $(MODEL)
	$(RUN) -m deltallama bench $(MODEL)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: one stamp for each thing that is installed ----------------------------------------------------------

$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 || \
		{ echo "deltallama needs Python 3.10 or newer as '$(PYTHON)', found: $$($(PYTHON) --version 2>&1 | tail -n 1)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' >/dev/null 2>&1 || \
		{ echo "deltallama needs the venv module of $(PYTHON) (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@compiler="$${CXX:-$$(command -v c++ || command -v g++ || command -v clang++ || echo c++)}"; \
	printf '#include <bit>\n#include <span>\nint main() { return 0; }\n' | $$compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || \
		{ echo "deltallama needs a C++20 compiler, and '$$compiler' is none (Debian, Ubuntu: apt install g++; or set CXX)"; exit 1; }
	@test -x $(RUN) && $(RUN) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check 'scikit-build-core>=0.11' 'cmake>=3.20' 'ninja>=1.10' 'cffi>=1.16'
	@touch $@

$(VENV)/.package: $(VENV)/.tools $(SOURCES)
	$(INSTALL) --editable .
	@touch $@

# A build of its own, with the test interface and with warnings as errors. It installs the package as well.
$(VENV)/.tests: $(VENV)/.tools $(SOURCES)
	$(INSTALL) $(TEST_BUILD) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.package $@

$(VENV)/.torch: $(VENV)/.tests
	$(INSTALL) $(TEST_BUILD) --editable '.[$(EXTRAS),train,compressed]'
	@touch $(VENV)/.package $(VENV)/.tests $@
