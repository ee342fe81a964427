# `make demo` and `make test` need Python 3.11+ and nothing else; both set up .venv first.

PYTHON ?= python3
# More arguments for pip, for example an index that holds CPU or CUDA builds of torch.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-base
PEERS := $(VENV)/.ready-peers

.PHONY: demo test test-kill test-faults test-sampling test-wheel test-torch bench-smollm2 check format wheel lock clean

demo: $(READY)
	$(BIN)/draftsmith launch --run runs/demo --until start -- demo
	$(BIN)/draftsmith logs -f runs/demo
	$(BIN)/draftsmith status runs/demo

test: $(READY) $(PEERS)
	$(BIN)/python -m pytest

# Kill -9 at 20 random moments of a run, resuming each time (minutes).
test-kill: $(READY)
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3000 tests/faults/test_kill.py

# Over 20,000 sampled outputs, each against the target's own distribution (minutes).
test-sampling: $(READY)
	$(BIN)/python -m pytest -m slow tests/decode

# Every fault of runs, a real sshd (as root, with openssh-server), 100 random kills: at most 25 minutes, its last line counts.
test-faults: $(READY)
	$(BIN)/python -m tests.faults

# The whole way on a real target (hours on a CPU); goes on where it was, and each stage can be run alone with --only.
bench-smollm2: $(READY) $(PEERS)
	$(BIN)/python -m benchmarks.smollm2

# Format, lint, types and the fast tests.
check: $(READY) $(PEERS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow and not process and not compiled and not long" -x

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

$(READY): requirements/base.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Draftsmith needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/base.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(PEERS): $(READY) requirements/peers.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/peers.txt
	touch $@

# The wheel in an environment that has nothing, not even this checkout.
test-wheel: wheel
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c requirements/base.txt dist/draftsmith-*.whl
	cd / && $(CURDIR)/.venv-wheel/bin/draftsmith --help
	cd / && $(CURDIR)/.venv-wheel/bin/draftsmith --version
	rm -rf .venv-wheel

# Compilation between threads on another torch, in an environment of its own (several GB): make test-torch TORCH=2.14.1
TORCH ?= 2.14.1
test-torch:
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	grep -v '^torch==' requirements/base.txt > .venv-torch-$(TORCH)/pins.txt
	.venv-torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==$(TORCH) -r .venv-torch-$(TORCH)/pins.txt
	.venv-torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	.venv-torch-$(TORCH)/bin/python -m pytest tests/compiling tests/pipeline/test_run.py -k "not report_7"

# Resolve base.in anew in an empty environment and pin what came out.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements/base.in
	( echo '# Pinned by `make lock` from base.in.'; .venv-lock/bin/pip freeze | sed 's/+cpu$$//' ) > requirements/base.txt
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
