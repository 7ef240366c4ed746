# From a fresh clone, `make compare`, `make test-fast` and `make test` do everything; `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
# What `make reproduce` runs: smoke takes minutes, laptop hours, paper days.
SCALE       ?= smoke
EXPERIMENTS ?= all
# The order of `make test-shuffled`; give the one that a run has printed to have its order again.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
SEED := $(SEED)
# What is passed on to pytest, asv and pip.
ARGS     ?=
PIP_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test workers and benchmarks share the cores: one thread each, or they fight over them.
ONE_THREAD := OMP_NUM_THREADS=1
PYTEST     := $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(JOBS)
FAST       := not slow and not long and not device
# Tests whose tensors can be made on any device: on the simulated one they run once more.
MATHEMATICS := test_criteria.py test_curvature.py test_linalg_cg.py test_linalg_factors.py test_linalg_inverse.py \
  test_optim.py test_providers_blocks.py test_solvers_damping.py test_solvers_dense.py test_solvers_pairs.py \
  test_solvers_per_layer.py
ASV_QUICK  := $(ONE_THREAD) $(BIN)/asv run --quick --show-stderr --python=same
# What `make bench` runs, as regular expressions over names with parameters: costs on the networks that
# take milliseconds, the memory of a step on the one that takes seconds, and ratios on both.
BENCH  ?= ^(?!.*(accelerator|imagenet10|Ratio|networks)) Step.track_peak_bytes.*imagenet10.*cpu $(NETWORKS)
# One pair on networks of every kind.
NETWORKS := networks.*fisher\W..(.ea-cg...)?.(fcnn|cnn|resnet8|vit-tiny|gpt-nano)....cross-entropy.*cpu
# What `make asv-history` runs at every commit of COMMITS, with the suites of this tree.
HISTORY ?= networks.(Step.time_run|Step.track_peak_bytes|Loss|Error).*fisher\W..(.(ea-cg|kfi)...)?.(fcnn|cnn|resnet8|vit-tiny|gpt-nano)....cross-entropy.*cpu
COMMITS ?= HEAD
PAST    := .asv/past
RATIOS ?= (narrow|cifar10).*cpu SGDRatio.*pch-1.*imagenet10.*cpu
say = @printf '==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help install compare test test-fast test-shuffled test-adversarial test-long test-device lint types format reproduce reproduce-quick bench bench-device asv-quick asv-check asv-history asv-publish clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Constraining torch in the one command that installs everything keeps pip from fetching another
# build of it first; PIP_CONSTRAINT pins the build backend, which -c does not reach.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' || \
	  { echo 'curvlab needs Python 3.11.4 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	$(say) 'creating $(VENV) and installing curvlab (a few minutes the first time)'
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check \
	  -c constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

install: $(STAMP) ## create .venv with everything in it

compare: $(STAMP) ## compare providers and solvers on the embedded data set
	$(say) 'curvlab compare'
	@$(BIN)/curvlab compare $(ARGS)

reproduce: $(STAMP) ## run the paper's tables and figures again: SCALE=smoke|laptop|paper
	$(say) 'curvlab reproduce $(EXPERIMENTS) --scale $(SCALE)'
	@$(ONE_THREAD) $(BIN)/curvlab reproduce $(EXPERIMENTS) --scale $(SCALE) $(ARGS)

reproduce-quick: EXPERIMENTS := table2 fig-nonconvex-cifar10
reproduce-quick: reproduce ## one table and one figure of it, at small scale

test: $(STAMP) ## run the whole test suite, doctests included
	$(say) 'pytest, $(JOBS) workers'
	@$(PYTEST) $(ARGS)

test-fast: $(STAMP) ## run what takes less than a second each: the inner loop, under 90 seconds
	$(say) 'pytest, $(JOBS) workers, the fast tests'
	@$(PYTEST) -m '$(FAST)' $(ARGS)

test-shuffled: $(STAMP) ## run the fast tests in a random order: SEED=...
	$(say) 'pytest, $(JOBS) workers, the fast tests shuffled: make test-shuffled SEED=$(SEED)'
	@$(PYTEST) -m '$(FAST)' --random-order --random-order-seed=$(SEED) $(ARGS)

test-adversarial: $(STAMP) ## run the adversarial suite alone, and print its counts
	$(say) 'pytest tests/adversarial, $(JOBS) workers'
	@$(PYTEST) tests/adversarial $(ARGS)

test-long: $(STAMP) ## run what does not fit CI: the property tests with 500 examples each
	$(say) 'pytest, $(JOBS) workers, property tests with many examples'
	@HYPOTHESIS_PROFILE=thorough $(PYTEST) -m 'long or hypothesis' $(ARGS)

test-device: $(STAMP) ## run what needs an accelerator on a simulated one, which is built the first time
	$(say) 'pytest, $(JOBS) workers, on the simulated accelerator'
	@$(ONE_THREAD) $(BIN)/python -m tests.simdev.device
	@$(PYTEST) -m device tests/simdev $(ARGS)
	$(say) 'the tests of the mathematics there'
	@$(PYTEST) -p tests.simdev.plugin -m '$(FAST)' $(addprefix tests/,$(MATHEMATICS)) $(ARGS)

lint: $(STAMP) ## check style and formatting
	$(say) 'ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## check types
	$(say) 'mypy'
	@$(BIN)/mypy

format: $(STAMP) ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## benchmark this tree, then print the table of ratios (under 10 minutes)
	$(say) 'asv, one sample each: $(BENCH)'
	@$(BIN)/asv machine --yes >/dev/null
	@$(ASV_QUICK) $(foreach regex,$(BENCH),-b '$(regex)') $(ARGS)
	$(say) 'ratios to rivals, measured in turns; lower is better'
	@$(ONE_THREAD) $(BIN)/python -m benchmarks.ratio_table $(foreach regex,$(RATIOS),'$(regex)')

bench-device: $(STAMP) ## times, peaks and launch bounds on this machine's accelerator, into reports/device
	$(say) 'steps on the accelerator'
	@$(BIN)/python -m benchmarks.device $(ARGS)

asv-quick: $(STAMP) ## one sample of every benchmark of the narrow network
	$(say) 'asv, narrow network'
	@$(BIN)/asv machine --yes >/dev/null
	@$(ASV_QUICK) -b '^(?!.*(accelerator|peakmem|tanh|relu)).*narrow' $(ARGS)

asv-check: $(STAMP) ## check that every benchmark is found and valid
	$(say) 'asv check'
	@$(ONE_THREAD) $(BIN)/asv check --python=same

asv-history: $(STAMP) ## measure networks of every kind at COMMITS='one two three', for asv-publish
	@$(BIN)/asv machine --yes >/dev/null
	@for commit in $$(git rev-list --no-walk=unsorted $(COMMITS)); do \
	  printf '==> asv, %s\n' "$$commit"; \
	  rm -rf $(PAST) && mkdir -p $(PAST) && git archive "$$commit" curvlab | tar -x -C $(PAST) && \
	  PYTHONPATH=$(CURDIR)/$(PAST) $(ONE_THREAD) $(BIN)/asv run --python=same --show-stderr -a rounds=1 -a repeat=5 \
	    --set-commit-hash "$$commit" -b '$(HISTORY)' $(ARGS) || exit 1; \
	done; rm -rf $(PAST)

asv-publish: $(STAMP) ## build the page of the benchmark history
	@$(BIN)/asv publish
	$(say) 'the page is .asv/html/index.html; `$(BIN)/asv preview` serves it'

clean: ## remove the environment, caches and built files
	$(say) 'removing $(VENV), caches and built files'
	@rm -rf $(VENV) build dist .asv .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
