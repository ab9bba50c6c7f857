# make setup | demo | test | gates | newest | oldest | lint | pictures | tables

# The interpreter that makes .venv: `make setup PYTHON=python3.12`. Debian packs ensurepip, and with it
# pip, as python3-venv.
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $$python && break; done)

VENV := .venv
INSTALLED := $(VENV)/.installed-from-pyproject
# DeepSpeed looks for ninja on PATH when it builds an operator.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
unexport PYTHONDONTWRITEBYTECODE

# Two ranks need two GPUs; on anything less they are two CPU processes, one thread each.
ON_CPU = $(shell $(VENV)/bin/python -c "from harness.layout.world import visible_gpus as gpus; \
	print('DS_ACCELERATOR=cpu' * (len(gpus()) < 2))")

.PHONY: setup demo test gates newest oldest lint pictures tables

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -x $(VENV)/bin/pip || test -n "$(PYTHON)" || { echo \
		"no Python 3.11 to 3.13 with venv (Debian: python3-venv): make setup PYTHON=/path/to/python"; exit 1; }
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@# uv installs in a minute where pip takes three. Where it cannot be had, or does not reach the packages
	@# (it reads none of pip's configuration files), pip does it. Both compile: without bytecode, a rank
	@# takes 17 s to import its packages, with it 7.
	$(VENV)/bin/python -m pip install --quiet uv && \
		UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(VENV)/bin/uv pip install --quiet --compile-bytecode \
			--python $(VENV)/bin/python --editable '.[dev]' || \
		$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(ON_CPU) $(VENV)/bin/torchrun --nproc-per-node 2 \
		harness/train.py --deepspeed ds_configs/zero3.json --config docs/demo.toml
	@echo "Open the report in a browser. To train on your own data, start from a recipe (README.md)."

# Every promise of the README once.
test: setup
	$(VENV)/bin/python -m pytest -q -n 2 --durations 10

# Covering sets, planted defects, faults, Slurm, pages: about 45 minutes on two cores. Stopped, it goes
# on where it was. `make gates ONLY="faults slurm"` runs these; tests/gates/gates.toml lists all, also
# those that run only by name: gguf, mutants, oldest and newest.
gates: setup
	$(VENV)/bin/python -m tests.gates $(ONLY)

# build/newest: the newest packages, upper bounds lifted. build/oldest: the lower bounds. The gates of
# these names run on them.
newest oldest: setup
	$(VENV)/bin/python -m tests.gates.releases $@

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.sizes

# Every page in a real browser, at the widths of a laptop and a phone, light and dark: look at them.
pictures: setup
	$(VENV)/bin/python -m tests.pictures build/pictures

# All cells of the gates, into build/tables: hours, before a release.
tables: setup
	mkdir -p build/tables
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.check_parity --full \
		--out build/parity > build/tables/parity.txt
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.check_parity --self-test \
		> build/tables/parity_self_test.txt
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.compare_divided \
		> build/tables/families_divided.txt
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.measure_memory --full \
		--out build/memory > build/tables/memory_accuracy.txt
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.check_streams --full \
		--out build/streams --markdown docs/host_waits.md
	$(VENV)/bin/python tools/rehearse.py --all --gpus 8 --ranks 2 model.name=llama-3-8b \
		--markdown build/tables/rehearsal.md
	SOAK=200 $(VENV)/bin/python -m pytest -q -s --gate=faults tests/faults/test_soak.py \
		> build/tables/soak.txt
	NVME=1 $(VENV)/bin/python -m pytest -q tests/plan/test_swap_space.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.gates.check_checkpoints --full \
		--out build/checkpoints > build/tables/checkpoints.txt
