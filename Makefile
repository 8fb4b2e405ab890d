# From a fresh clone with nothing but Python 3.11 to 3.13, make and a package index.
# The virtual environment is .venv; PYTHON=... picks the interpreter it is made from.

SUITS := -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python $(SUITS) 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
JOBS ?= 2
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.PHONY: help quickstart test check docs soak kernels-report gpu-check clean

help:
	@echo "make quickstart   install, train a small model with RL (minutes, CPU is enough), print the results"
	@echo "make test         install, run all tests that this machine can run; JOBS=2: in so many processes"
	@echo "make check        format, lint, types, import contracts"
	@echo "make docs         build the documentation into build/site; a dead link is an error"
	@echo "make soak         the long fault, kill and resume tests; SLICE=3/80: every 80th of them, from the third on"
	@echo "make kernels-report  registers, spills, shared memory and bytes of each Triton kernel on each GPU; needs no GPU"
	@echo "make gpu-check    on a CUDA box: kernels against their twins, then attention, decode and prefill timed"
	@echo "make clean        remove .venv and what tools left behind; outputs/ stays"

# --resume: an interrupted quickstart goes on where it was.
quickstart: .venv/installed
	$(BIN)/olmorl train configs/quickstart.toml --resume

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not soak" -n $(JOBS) --dist loadfile

soak: .venv/installed-dev
	$(BIN)/python -m pytest -m soak

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

kernels-report: .venv/installed
	TRITON_INTERPRET=0 $(BIN)/python -m inference.kernels.gpu_report

# Needs torch, triton, transformers, numpy, safetensors and pytest, and nothing of ours installed: takes .venv where it
# is, else the python3 of the box. ARGS=--dry goes through it without a GPU.
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m inference.gpu_check $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Torch goes first and pinned, so that nothing after it pulls another build. On Linux the index has the CUDA build,
# gigabytes that a machine without an NVIDIA driver has no use for: there PyTorch's own CPU wheels win if reachable.
.venv/torch: constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) $(SUITS) || { echo "no Python 3.11 to 3.13 found; install one, or say make PYTHON=/path/to/it" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making .venv from $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@wheels=; if test "$$(uname)" = Linux && ! test -e /proc/driver/nvidia/version && $(BIN)/python -c \
		"import urllib.request; urllib.request.urlopen('$(CPU_WHEELS)/torch/', timeout=5)" 2>/dev/null; \
		then wheels="--extra-index-url $(CPU_WHEELS)"; fi; \
	echo "installing $(TORCH)"; \
	$(BIN)/python -m pip install --disable-pip-version-check -q $(TORCH) $$wheels
	@touch $@

.venv/installed: .venv/torch pyproject.toml
	@echo "installing olmorl"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "installing what tests and checks need"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	@touch $@

.venv/installed-docs: .venv/installed
	@echo "installing what the documentation is built with"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[docs]"
	@touch $@
