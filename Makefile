# Two commands set everything up on a fresh machine: `make serve` and `make test`. Neither needs root, both can be
# repeated: the environment in .venv is installed again only when pyproject.toml or constraints.txt has changed.
#
#   make serve ARGS="-m model.gguf --port 8080"    any flags of ds4-server
#   make test PYTEST_ARGS="tests/chat -x"          only some of the tests
#   make test-page                                 the page at / in headless Chromium, where there is one
#   make test TEST_JOBS=0                          in one process (else one for each core, at most 8)
#   make test-gpu                                  the kernels at full shapes, on a machine with a CUDA device
#   make test-clients                              coding agents from npm against a server of this machine
#   make test-suites                               outside suites against a server of this machine
#   make check-full FILE=model.gguf REFERENCE=reference.npz
#   make PYTHON=/path/to/python3.12 test           a certain Python for the environment

SHELL := /bin/sh
VENV := .venv
STAMP := $(VENV)/.installed
PYTHON ?=
ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= auto

# The first of these that runs, is 3.11 to 3.14 and can make an environment.
CANDIDATES = $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python \
	$(sort $(wildcard $(HOME)/.pyenv/versions/3.1[1-4]*/bin/python3))
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

.PHONY: help serve test test-page test-gpu test-clients test-suites check-full lint format clean

help:
	@sed -n '/^# Two/,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "Targets: serve, test, test-page, test-gpu, test-clients, test-suites, check-full, lint, format, clean"

serve: $(STAMP)
	@echo "Starting ds4-server: http://127.0.0.1:8000 and the embedded model, unless ARGS says otherwise. Ctrl+C stops it."
	@echo 'For a real model: make serve ARGS="-m /path/to/model.gguf"; for all flags: make serve ARGS=--help'
	@exec $(VENV)/bin/ds4-server $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest -n $(TEST_JOBS) --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# The page in a browser: the system's Chromium, driven by a package that only this needs.
test-page: $(STAMP)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
		echo "make test-page needs Chromium (on Debian: apt-get install chromium); it downloads none." >&2; exit 1; }
	@$(VENV)/bin/python -c 'import playwright' 2>/dev/null || \
		$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,page]'
	$(VENV)/bin/python -m pytest tests/server/test_chat_page.py tests/server/page $(PYTEST_ARGS)

# The kernels and the model in them on a CUDA device, at all shapes: with the python3 that has its torch and triton, not
# with .venv; in GPU_JOBS processes where pytest-xdist is installed, as most of the time goes into compiling.
GPU_PYTHON ?= python3
GPU_JOBS ?= 8
test-gpu:
	@$(GPU_PYTHON) -c 'import torch, triton; assert torch.cuda.is_available(), "PyTorch finds no CUDA device"'
	OMP_NUM_THREADS=1 PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/ops/kernels tests/model/cuda \
		$$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo "-n $(GPU_JOBS)") $(PYTEST_ARGS)

# Claude Code, Codex, opencode and Pi (2 GB of node_modules) and the SDKs, each in a tool loop; not part of the tests.
# CLIENT_ARGS are those of tools/client_check.py, such as `--tiny pi`.
NPM := tools/client_checks/npm
CLIENT_ARGS ?=
test-clients: $(STAMP) $(NPM)/node_modules/.package-lock.json
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/client_check.py $(CLIENT_ARGS)

$(NPM)/node_modules/.package-lock.json: $(NPM)/package.json $(NPM)/package-lock.json
	cd $(NPM) && npm install --no-save
	@touch $@

# schemathesis, llama-benchy, tool-eval-bench and lucebench; SUITE_ARGS are those of tools/suites.py.
SUITES := .venv-suites
SUITE_ARGS ?=
test-suites: $(STAMP) $(SUITES)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/suites.py $(SUITE_ARGS)

$(SUITES)/.installed: tools/suites.txt $(STAMP)
	$(VENV)/bin/python -m venv $(SUITES)
	$(SUITES)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/suites.txt
	@touch $@

# One pass of a full-size file on the CPU, compared with reference logits; not part of the tests.
check-full: $(STAMP)
	$(VENV)/bin/python tools/check_full.py --file "$(FILE)" $(if $(REFERENCE),--reference "$(REFERENCE)")

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(SUITES) $(NPM)/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@if ! $(VENV)/bin/python -c '$(USABLE)' >/dev/null 2>&1 || ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
		for python in $(CANDIDATES); do \
			if command -v "$$python" >/dev/null 2>&1 && "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
				found=$$python; break; \
			fi; \
		done; \
		if [ -z "$${found:-}" ]; then \
			echo "ds4 needs Python 3.11 to 3.14 with its venv module, and none was found (tried: $(strip $(CANDIDATES)))." >&2; \
			echo "Install one (on Debian and Ubuntu the packages python3 and python3-venv; or pyenv, which needs no root)," >&2; \
			echo "or name yours: make PYTHON=/path/to/python3.12 serve" >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$found"; \
		rm -rf $(VENV); \
		"$$found" -m venv $(VENV); \
	fi
	@echo "Installing ds4 and its dependencies into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(STAMP)
