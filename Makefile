# `make demo` and `make test` do all the set-up on a fresh machine with Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Run a second time without the memory of output shapes, which must change nothing but the time.
CAPTURES := $(addprefix tests/capture/test_,sequential.py aliasing.py collectives.py)
# Of these, `make test` runs a part.
SAMPLED := $(addprefix tests/,test_cases.py gallery sweep capture/test_libraries.py)

.PHONY: demo test test-all lint docs bench campaign random clean

demo: $(STAMP)
	$(BIN)/graphguard demo

test: lint docs
	$(BIN)/python -m pytest -n 2
	GRAPHGUARD_TEST_SHAPE_CACHE=off $(BIN)/python -m pytest -n 2 $(CAPTURES)

# What `make test` leaves out: every proof case at every size, with all claims compared, and every example. About 30 minutes on
# two cores.
test-all: $(STAMP)
	GRAPHGUARD_TEST_CASES=all $(BIN)/python -m pytest -n 2 $(SAMPLED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in site/. Warnings are errors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/graphguard bench capture
	$(BIN)/graphguard bench engine
	$(BIN)/graphguard bench faults

# 20,000 mutants and 2,000 rewrites of the proof cases, judged by execution and by the prover: about an hour on two cores.
campaign: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m graphguard.mutate.campaign --jobs 2 --locate-every 25 --write docs/campaign.md

# 20,000 random programs, every claim about every tensor of them compared: a quarter of an hour on two cores.
random: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m graphguard.fuzz.campaign --jobs 2 --write docs/random.md

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs,libraries]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
