# Every target makes what it needs and can be repeated; VENV and PYTHON may be given.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN = $(VENV)/bin/python
# Two files of tests side by side: the ranks of one wait for each other while those of the other compute.
WORKERS ?= -n 2 --dist loadfile
export PYTHONWARNINGS ?= ignore::FutureWarning

.PHONY: setup demo test test-full check format bench gpu-check clean

setup: $(VENV)/.ready

$(VENV)/.ready: setup.py scripts/install_torch.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed; give PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade "pip>=24" "setuptools>=64"
	$(RUN) scripts/install_torch.py
	$(RUN) -m pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	$(RUN) scripts/demo.py

test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests $(WORKERS)

test-full: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests $(WORKERS) -m "full or not full"

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m vulture
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/unit/test_architecture.py

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	$(RUN) benchmarks/driver_overhead.py
	$(RUN) -W ignore benchmarks/planning.py --write
	$(RUN) -W ignore benchmarks/snapshot.py --write
	$(RUN) -W ignore benchmarks/every_iteration.py --write
	$(RUN) -W ignore benchmarks/replay.py --write
	$(RUN) -W ignore benchmarks/boundary_logs.py --write
	$(RUN) -W ignore benchmarks/localized_recovery.py --write
	$(RUN) -W ignore benchmarks/simulated_ettr.py --write
	$(RUN) benchmarks/pec_accuracy.py

gpu-check: setup
	$(RUN) -m pytest tests/gpu

clean:
	rm -rf $(VENV) .data .demo build dist *.egg-info
