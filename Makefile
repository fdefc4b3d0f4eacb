# The two commands that a newcomer needs are `make demo` and `make test`; each makes .venv if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two at a time: tests wait for processes and for each other's messages half of their time.
# A process that dies is not replaced, as the next would begin with the test that it died of.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0
READY := $(VENV)/.ready
# torch comes first and pinned: on its own, pip would pick any build that the other packages admit.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: install demo test sweep more families lint types format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,dev,bench]"
	touch $(READY)

# Two ranks on two cores: one thread a rank.
demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/lightning-moe-ep fit --config configs/quickstart.yaml

test: $(READY)
	$(PYTEST)

# What `make test` leaves out: every Mixture-of-Experts family of transformers,
sweep: $(READY)
	$(PYTEST) -m sweep

# and more layouts, more kills, the benchmarks.
more: $(READY)
	$(PYTEST) --no-loadscope-reorder -m more

# Writes docs/families.md from such a run.
families: $(READY)
	$(BIN)/python -m tests.families.table

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info
