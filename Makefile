# make              install into .venv
# make quickstart   install into .venv and watch GRPO raise a small model's accuracy
# make test         the tests, on all cores, and the quickstart with its checks (installs what is missing)
# make test-learners  learners' optimizers, precisions, offloads and saved states in every layout, and rehearsed steps
# make test-kernels Liger's kernels of a model's layers, in Triton's interpreter on a CPU (installs 200 MB into build/kernels)
# make test-e2e     more runs and engines than make test starts; make test-all runs all of these and the slow ones
# make test-kills   twenty kills of whole runs and single processes at random moments, each resumed to the bit: about 20 minutes
# make test-gpu-config  what the packages for GPUs make of our engines and calls; needs 9 GB and gcc, and no GPU
# make test-packages  agents of the OpenAI Agents SDK and tasksets of verifiers, in environments of their own
# make dev          install into .venv what tests and linters need as well
# make lint         ruff, mypy, clang-format, hadolint and shellcheck
# make docs         the documentation as a site, into build/site (installs only what that needs)
# make parity       every parallel layout against one rank, into docs/parity.md
VENV ?= .venv
NATIVE := setup.py pyproject.toml $(wildcard csrc/*.txt csrc/*/*)

.PHONY: quickstart check test-changed test test-learners test-kernels test-e2e test-all test-kills test-packages test-gpu-config record-gpu-config lint docs bench parity install dev clean
install: $(VENV)/.installed
	@echo "mgrpo is installed in $(VENV). Next: source $(VENV)/bin/activate; mgrpo --help; make quickstart"

$(VENV)/.installed: requirements/install.sh requirements/cpu.txt requirements/gpu.txt requirements/gpu.lock $(NATIVE)
	sh requirements/install.sh $(VENV)
	touch $@

$(VENV)/.installed-dev: requirements/dev.txt requirements/judge.txt $(VENV)/.installed
	sh requirements/install.sh $(VENV) dev
	touch $@

dev: $(VENV)/.installed-dev

quickstart: $(VENV)/.installed
	$(VENV)/bin/mgrpo train --config examples/configs/quickstart.yaml

PYTEST := $(VENV)/bin/python -m pytest
# A process for each core; what a file's tests share, they share in one process.
ON_ALL_CORES := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
WITHOUT_ENGINES := tests/repo tests/ranks tests/unit tests/gpu_config

# The engines that `make test` starts.
MAIN := tests/e2e/test_main_job.py tests/e2e/test_gpu_whole_run.py

# Without C++ and without processes, for every save.
PURE := tests/unit/algo tests/unit/config tests/unit/moving tests/unit/packing tests/unit/test_layout.py

check: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTEST) -m "not slow" $(ON_ALL_CORES) --ignore tests/repo/test_native.py tests/repo $(PURE)

# SINCE=REVISION compares with that one instead of the last commit.
test-changed: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(ON_ALL_CORES) $$($(VENV)/bin/python -m tests.repo.changed $(SINCE))

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not learners" $(ON_ALL_CORES) $(WITHOUT_ENGINES)
	$(PYTEST) $(MAIN)

test-learners: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and learners" $(ON_ALL_CORES) tests/ranks tests/unit/rehearsal

# Apart from $(VENV): with Triton there, vLLM's CPU build would take other kernels.
KERNELS := build/kernels
$(KERNELS)/.installed: requirements/kernels.txt $(VENV)/.installed-dev
	$(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade --target $(KERNELS) -r $<
	touch $@

test-kernels: $(KERNELS)/.installed
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(KERNELS) $(PYTEST) tests/unit/policy/test_liger.py

test-e2e: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" tests/e2e $(addprefix --ignore ,$(MAIN))

test-all: $(VENV)/.installed-dev
	$(PYTEST) $(ON_ALL_CORES) $(WITHOUT_ENGINES)
	$(PYTEST) tests/e2e --ignore tests/e2e/test_kills.py

# MGRPO_KILLS=N kills N times, MGRPO_KILLS_SEED=N repeats the draws of an earlier time.
test-kills: $(VENV)/.installed-dev
	$(PYTEST) --capture no tests/e2e/test_kills.py

# Packages that a trainer must not have, each in an environment of its own.
PACKAGES := build/packages
$(PACKAGES)/%/.installed: requirements/%.txt
	$${PYTHON:-python3} -m venv $(PACKAGES)/$*
	$(PACKAGES)/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	touch $@

test-packages: $(VENV)/.installed-dev $(PACKAGES)/agents/.installed $(PACKAGES)/verifiers_v1/.installed
	MGRPO_TEST_AGENTS_PYTHON=$(CURDIR)/$(PACKAGES)/agents/bin/python \
	MGRPO_TEST_VERIFIERS_V1_PYTHON=$(CURDIR)/$(PACKAGES)/verifiers_v1/bin/python \
		$(PYTEST) tests/unit/environments/endpoint/test_clients.py tests/unit/environments/test_verifiers.py \
		tests/e2e/test_agent_examples.py::test_an_agent_of_the_agents_sdk_learns

# On a machine without a GPU. GPU_VENV is the place of an environment that several checkouts share.
GPU_VENV ?= build/gpu-venv
$(GPU_VENV)/.installed-packages: requirements/gpu.txt requirements/gpu.lock requirements/dev.txt
	MGRPO_CUDA=1 sh requirements/install.sh $(GPU_VENV) packages
	$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
		$$(grep -E '^(iniconfig|pluggy|pytest|pytest-timeout)==' requirements/dev.txt)
	touch $@

test-gpu-config: $(GPU_VENV)/.installed-packages
	$(GPU_VENV)/bin/python -m pytest tests/gpu_config

record-gpu-config: $(GPU_VENV)/.installed-packages
	mkdir -p build && $(GPU_VENV)/bin/python -m tests.gpu_config.record > build/recorded.json
	mv build/recorded.json tests/gpu_config/recorded.json

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.cpp csrc/*/*.cu csrc/*/*.h tests/native/*.cpp
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck .ci/run requirements/install.sh examples/cluster/slurm.sbatch

# Without torch and vLLM: docstrings are read, not imported.
DOCS := build/docs-venv
$(DOCS)/.installed: requirements/docs.txt
	$${PYTHON:-python3} -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "open build/site/index.html, or for the search: python3 -m http.server --bind 127.0.0.1 --directory build/site"

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/bench.py ops
	$(VENV)/bin/python tools/bench.py loop

parity: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/parity.py --markdown docs/parity.md

clean:
	rm -rf build output *.egg-info mgrpo/*.so $(VENV)/.installed $(VENV)/.installed-dev
