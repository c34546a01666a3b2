# Every target makes what it needs and can be repeated; VENV and PYTHON may be given.
VENV ?= .venv
# The first that starts: a pyenv has names for versions that are not switched on.
first_of = $(shell for p in $(1); do "$$p" -c "" 2>/dev/null && echo "$$p" && break; done)
PYTHON ?= $(call first_of,python3.12 python3.13 $(wildcard $(HOME)/.pyenv/versions/3.1[23].*/bin/python3))
NO_PYTHON = no Python 3.12 or 3.13 found: install one (apt install python3.12, pyenv install 3.12, or uv python install \
	3.12) and give PYTHON=/path/to/python3.12
RUN = $(VENV)/bin/python
# Two files of tests side by side: the ranks of one wait for each other while those of the other compute. In the order of
# tests/conftest.py: by itself xdist puts files of few tests last, which are the longest ones.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# A folder of wheels, filled by `make wheelhouse`: pip then asks no package index.
ifdef WHEELHOUSE
export PIP_NO_INDEX = 1
export PIP_FIND_LINKS = $(abspath $(WHEELHOUSE))
endif
export PYTHONWARNINGS ?= ignore::FutureWarning
# Some images turn this on: each process then compiles this source tree again.
export PYTHONDONTWRITEBYTECODE =

# LOCKED=1: packages of which every file has the recorded hash, torch apart, whose build follows the machine.
LOCK = requirements/lock-py$(shell $(RUN) -c 'import sys; print("%d%d" % sys.version_info[:2])').txt

.PHONY: setup demo test test-ci test-core test-full test-oldest check format docs bench gpu-check gpu-bundle wheelhouse lock clean

setup: $(VENV)/.ready

# Of Megatron-Bridge its wheel alone: what its training modules import besides has stand-ins in the tests.
BRIDGE ?= 0.6.2
$(VENV)/.ready: setup.py pyproject.toml scripts/install_torch.py scripts/install_te_python.py
	@[ -n "$(PYTHON)" ] || { echo "$(NO_PYTHON)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; $(OLDEST_PYTHON) <= v <= (3, 13) or sys.exit("Python %d.%d is not supported (expected 3.12 or 3.13): give PYTHON=/path/to/python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade "pip>=24" "setuptools>=77"
	$(RUN) scripts/install_torch.py
	$(if $(LOCKED),$(RUN) -m pip install --quiet --require-hashes --no-deps -r $(LOCK))
	$(RUN) -m pip install --quiet --editable ".[dev]"
	$(RUN) scripts/install_te_python.py
	$(RUN) -m pip install --quiet --editable ".[muon]" || echo "emerging-optimizers is not there: tests of Muon are skipped"
	$(if $(BRIDGE),$(RUN) -m pip install --quiet --no-deps megatron-bridge==$(BRIDGE))
	touch $@
	@echo "$(VENV) is ready. Next: make demo"

OLDEST_PYTHON = (3, 12)

demo: setup
	$(RUN) scripts/demo.py

# Three tiers: what has no marker, the marker `ci`, and everything.
TESTS = OMP_NUM_THREADS=1 $(RUN) -m pytest tests $(WORKERS) --durations=20
test: setup
	$(TESTS)

test-ci: setup
	$(TESTS) -m "ci and not full"

test-full: setup
	$(TESTS) -m "" --hypothesis-profile full

# What touches Megatron-Core, for another release of it: `make test-core VENV=...`.
CORE_TESTS = $(addprefix tests/unit/moe/test_, \
	core_versions.py versions.py frozen_upstream.py boundary_upstream.py step_guard.py optimizer_state.py \
	snapshot_capture.py sharing.py token_counter.py fused_adam.py boundary_schedules.py dense_reader.py digest.py) \
	$(addprefix tests/unit/pretrain/test_, cpu_device.py te_on_cpu.py adam_kernels.py low_precision_flags.py) \
	$(addprefix tests/unit/policy/test_, model_shape.py topology.py) \
	tests/unit/test_docs.py tests/process/test_frozen_execution.py tests/process/test_transformer_engine.py

test-core: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(CORE_TESTS) $(WORKERS) -m "not full"

# The oldest release that is supported, laid before the one of the environment: a killed job, `full` and `sparse`.
OLDEST = 0.17.1
KILLED = test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit
test-oldest: setup
	$(RUN) -m pip install --quiet --no-deps --upgrade --target build/core-$(OLDEST) megatron-core==$(OLDEST)
	PYTHONPATH=$(abspath build/core-$(OLDEST)) $(RUN) -c 'from megatron.core.package_info import __shortversion__ as v; assert v == "$(OLDEST)", v'
	PYTHONPATH=$(abspath build/core-$(OLDEST)) OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/stock/test_stock_recovery.py -k $(KILLED)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m vulture
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q tests/unit/test_architecture.py tests/unit/test_budgets.py

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The pages as a site with search, in build/site; a broken link is an error. In an environment of its own.
DOCS_VENV = build/site-venv
docs: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/python tools/site.py
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file build/mkdocs.yml
	@echo "open build/site/index.html"

$(DOCS_VENV)/.ready: tools/site-requirements.txt
	@[ -n "$(PYTHON)" ] || { echo "$(NO_PYTHON)" >&2; exit 2; }
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --requirement $<
	touch $@

# Each compares with a peer, gates a release, or makes data of a figure; `--quick` of each is a test. One that fails keeps
# no other from running.
BENCHMARKS = api_overhead training_thread planning control_plane transports snapshot every_iteration slow_links replay recovery replica_loss roll_forward drill localized_recovery planned_kills \
	memory_peaks pec_accuracy figure_jobs
bench: setup
	failed=; for name in $(BENCHMARKS); do $(RUN) -W ignore benchmarks/$$name.py --write || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "did not end well, or asked for more than was found:$$failed" >&2; exit 1; }

# Fails where no test ran. On a machine without internet: WHEELHOUSE=wheelhouse make gpu-check
gpu-check: setup
	$(RUN) scripts/gpu_check.py

# What a machine with a GPU, torch and no network lacks, in packs of at most 64 MiB with these sources; docs/gpu.md.
SM ?= 90
gpu-bundle: setup
	$(RUN) tools/gpu_bundle.py --sm $(SM)

# All that `make setup` installs, for a machine with a GPU and without internet: made on one with internet, the same
# Python and the same kind of CPU. GPU_PACKAGES="transformer-engine[pytorch]" is built from source, which takes nvcc.
wheelhouse:
	@[ -n "$(PYTHON)" ] || { echo "$(NO_PYTHON)" >&2; exit 2; }
	$(PYTHON) -m venv build/wheelhouse-venv
	build/wheelhouse-venv/bin/python -m pip install --quiet --upgrade "pip>=24"
	build/wheelhouse-venv/bin/python -m pip wheel --quiet --wheel-dir wheelhouse \
		"pip>=24" "setuptools>=77" wheel "$$(build/wheelhouse-venv/bin/python scripts/install_torch.py --name)" \
		".[dev]" $(GPU_PACKAGES)

# After a change of what is needed: records versions and hashes of this environment.
lock: setup
	$(RUN) tools/lock.py

clean:
	rm -rf $(VENV) .data .demo build dist *.egg-info
