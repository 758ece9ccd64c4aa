# Every target installs what it needs into .venv first. PYTHON picks the interpreter, WORKERS the test processes.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WARMUP := runs/warmup/policy/config.json
WARMUP_TOOLS := runs/warmup_tools/policy/config.json
LAST := runs/quickstart/checkpoints/last.ckpt
TRAINED := runs/quickstart/policy/config.json
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install native quickstart tools check test test-slow mutants versions sanitize cuda-check cuda-emulate bench-ops bench-rollout bench-trainer bench-compressors bench-methods bench-learner bench-arms bench-stability bench-turns bench-checker bench-reliability bench-distill bench-launches gpu gpu-carry docs docs-pages docs-links lint format typecheck dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with the pinned versions

# The stamp is written last: an install that failed halfway is tried again. torch comes first and build isolation
# is off because the native extension is compiled against the torch it will run with.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard cuda_ext/*.cpp cuda_ext/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# nothing but the package index is ever asked, and two test processes share two cores without fighting
quickstart tools check test test-slow: export HF_HUB_OFFLINE = 1
check test test-slow: export OMP_NUM_THREADS = 1

quickstart: $(INSTALLED) $(WARMUP) ## warm a tiny policy up (once), train it with Sparse-RL, write the report
	$(BIN)/sparse-rl fit --config configs/quickstart.yaml

tools: $(INSTALLED) $(WARMUP_TOOLS) ## the same for conversations with a calculator
	$(BIN)/sparse-rl fit --config configs/tools.yaml

$(WARMUP) $(WARMUP_TOOLS): runs/%/policy/config.json: configs/%.yaml | $(INSTALLED)
	$(BIN)/sparse-rl fit --config $<
	@test -s $@ && touch $@

$(LAST): configs/quickstart.yaml $(WARMUP)
	$(BIN)/sparse-rl fit --config configs/quickstart.yaml

$(TRAINED): $(LAST)
	$(BIN)/sparse-rl export --config configs/quickstart.yaml --ckpt_path=last --folder=$(dir $@)

# the mathematics, operations, cache, engine and learner, and one tiny rollout; pages, benchmarks and wrong inputs are for make test
CORE := tests/test_*.py tests/ops tests/cache tests/budgets tests/compressors tests/learner tests/replay tests/rollout/test_rollout.py tests/project
check: lint typecheck ## before every commit: linters, types and the core tests, four minutes
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow" $(wildcard $(CORE))

test: lint typecheck ## linters, types and the fast tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" --durations=20

test-slow: $(INSTALLED) ## the tests that take minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow

# NUMBER=160, SEED=20261126; a baseline of coverage first, which is kept in build/mutants as long as that folder is
mutants: $(INSTALLED) ## put small mistakes into the library: which do the fast tests notice? into docs/mutants.md; an hour or two
	$(BIN)/python tests/mutants.py --jobs $(WORKERS) $(if $(NUMBER),--number $(NUMBER)) $(if $(SEED),--seed $(SEED))

# END=oldest or END=newest runs one of them
versions: ## the fast core with the oldest and the newest versions that pyproject.toml allows, in build/versions; half an hour
	PYTHON=$(PYTHON) WORKERS=$(WORKERS) .ci/versions $(END)

native: $(INSTALLED) ## compile the native library again after a change in cuda_ext/
	$(BIN)/python setup.py -q build_ext --inplace

# A copy of the package with instrumented kernels; python itself is not instrumented, so the runtime is preloaded.
SANITIZED := build/sanitized
SANITIZER := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1 -DSPARSE_RL_NO_CLONES
sanitize: $(INSTALLED) ## op tests on CPU kernels built with the address and undefined-behavior sanitizers
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r sparse_rl_lightning exact_answers tests cuda_ext setup.py pyproject.toml LICENSE CHANGELOG.md README.md $(SANITIZED)/
	rm -f $(SANITIZED)/sparse_rl_lightning/*.so
	cd $(SANITIZED) && SPARSE_RL_BUILD=cpu SPARSE_RL_CFLAGS="$(SANITIZER)" $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && PYTHONPATH=. OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(abspath $(BIN))/python -m pytest -q -p no:cacheprovider tests/ops/test_native_attention.py tests/ops/test_native_body.py tests/ops/test_native_pages.py \
		tests/ops/test_native_scores.py tests/ops/test_native_evict.py tests/ops/test_native_torch.py tests/ops/test_native_errors.py tests/ops/test_native_loaded.py tests/ops/test_draw.py

cuda-check: $(INSTALLED) ## compile the CUDA kernels where nvcc is; fails on warnings, spilled registers and too few blocks per multiprocessor
	$(BIN)/python cuda_ext/check.py

EMULATED := build/emulated
cuda-emulate: $(INSTALLED) ## tests of ops, and of rollouts on a GPU, on the CUDA kernels, emulated on the CPU thread by thread
	rm -rf $(EMULATED) && mkdir -p $(EMULATED) && cp pyproject.toml $(EMULATED)/
	$(BIN)/python cuda_ext/emulation/build.py $(EMULATED)
	cd $(EMULATED) && SPARSE_RL_EMULATED=1 PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q \
		-p no:cacheprovider -m "not gpu" tests/ops/test_native_attention.py tests/ops/test_native_body.py tests/ops/test_native_pages.py tests/ops/test_native_scores.py \
		tests/ops/test_native_evict.py tests/ops/test_native_device.py tests/ops/test_float8_ops.py tests/ops/test_draw.py \
		tests/ops/test_attention.py tests/rollout/test_on_gpu.py

bench-ops: $(INSTALLED) ## time the ops against plain PyTorch on two cores
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.ops

bench-rollout: $(INSTALLED) ## time whole rollouts against transformers on two cores, half an hour
	$(BIN)/python -m benchmarks.rollout --device cpu

# CASES="512" and the like; runs that are finished below runs/trainer are not run again
bench-trainer: $(INSTALLED) $(WARMUP) ## whole training steps beside TRL's GRPOTrainer on two cores, half an hour
	$(BIN)/python -m benchmarks.trainer --save benchmarks/results $(if $(CASES),--cases $(CASES))

# STORIES=FOLDER says where stories260K is, if not where the tests look for it
bench-compressors: $(INSTALLED) $(TRAINED) ## measure what every compressor costs in quality, into docs/compressors.md
	$(BIN)/python -m benchmarks.compressors --save docs $(if $(STORIES),--stories $(STORIES))

bench-methods: $(INSTALLED) $(WARMUP) ## sparse-rl benchmark over every compressor, for the pages in docs/methods
	$(BIN)/python -m benchmarks.methods --save benchmarks/results

bench-checker: $(INSTALLED) ## how fast answers are checked; DATA=folder of the published benchmarks
	$(BIN)/python -m benchmarks.checker $(if $(DATA),--data $(DATA))

bench-learner: $(INSTALLED) ## peak memory of the learner's log-probs, all logits against chunks
	$(BIN)/python -m benchmarks.learner --device cpu

# ARMS="--budgets 30 26 --seeds 0 1" and the like; what is finished below runs/arms is not run again
bench-arms: $(INSTALLED) $(WARMUP) ## dense, naive, Sparse-RL, replay and all corrections on one task, into docs/; an hour or two
	$(BIN)/python -m benchmarks.arms --save docs $(ARMS)

# RUNS="--studies main --seeds 10" and the like; a run that has a line in benchmarks/results/stability.jsonl is not run again
bench-stability: $(INSTALLED) ## the papers' claims at laptop scale, into docs/results.md; some hours
	$(BIN)/python -m benchmarks.stability --save docs $(RUNS)

bench-turns: $(INSTALLED) ## training on conversations, arm by arm, into docs/turns.md; about an hour
	$(BIN)/python -m benchmarks.turns --save docs $(RUNS)

bench-distill: $(INSTALLED) $(WARMUP) ## the tail of the acceptance before and after DistillSparse, into docs/sparrow.md
	$(BIN)/python -m benchmarks.distill --save docs

bench-reliability: $(INSTALLED) ## 200 random faults in small runs: survived and lost, half an hour
	$(BIN)/python -m benchmarks.reliability --save benchmarks/results

bench-launches: $(INSTALLED) ## count launches, bytes and waits of a GPU's host at real shapes, without a GPU; a minute
	$(BIN)/python -m benchmarks.launches --save benchmarks/results

# GPU_PYTHON needs torch, transformers and lightning; RESULTS is the folder of the pages
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
RESULTS ?= benchmarks/results
GPU := $(GPU_PYTHON) -m benchmarks.gpu --save $(RESULTS)
gpu: ## all that a GPU is asked for, 25 minutes and more; docs/gpu.md has it in calls of nine minutes
	$(GPU)

# ARCHS="90" by default, the H100's and H200's compute capability
gpu-carry: $(INSTALLED) ## wheels and kernels for make gpu on a machine without network and compiler, into build/gpu
	$(BIN)/python -m benchmarks.gpu.needs --download build/gpu/wheels
	$(BIN)/python -m benchmarks.gpu.kernels --build build/gpu/kernels --archs "$(or $(ARCHS),90)"

SPHINX := $(BIN)/python -m sphinx -W --keep-going -q
docs: $(INSTALLED) ## the documentation as a site in build/docs, every warning an error
	$(SPHINX) -b html docs build/docs
	@echo "Written: build/docs/index.html"

docs-pages: $(INSTALLED) ## write again what docs/ takes from code, configurations and measured tables; draw its pictures
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.figures

docs-links: $(INSTALLED) ## ask every link of the documentation whether it answers; needs the network
	$(SPHINX) -b linkcheck docs build/docs-links

lint: $(INSTALLED) ## ruff, format check, spelling, notebooks without output
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify $(NOTEBOOKS))

format: $(INSTALLED) ## let ruff and nbstripout rewrite what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NOTEBOOKS),$(BIN)/nbstripout $(NOTEBOOKS))

typecheck: $(INSTALLED) ## mypy --strict on the packages
	$(BIN)/mypy

# A wheel for every CPU; SPARSE_RL_BUILD=python builds one without native library, for every machine.
dist: export SPARSE_RL_BUILD := $(or $(SPARSE_RL_BUILD),cpu)
dist: $(INSTALLED) ## sdist and wheel into dist/, checked; the README's example in an environment made from the wheel
	rm -rf dist
	$(BIN)/python -m build -q --no-isolation .
	$(BIN)/python .ci/check_dist.py dist

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
