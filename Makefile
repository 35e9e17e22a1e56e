# make              install into .venv
# make quickstart   install into .venv and watch GRPO raise a small model's accuracy
# make test         the tests, on all cores, and the quickstart with its checks (installs what is missing)
# make test-e2e     more runs and engines than make test starts; make test-all adds the slow ones
# make dev          install into .venv what tests and linters need as well
# make lint         ruff, mypy, clang-format, hadolint and shellcheck
# make docs         the documentation as a site, into build/site (installs only what that needs)
# make parity       every parallel layout against one rank, into docs/parity.md
VENV ?= .venv
NATIVE := setup.py pyproject.toml $(wildcard csrc/*.txt csrc/*/*)

.PHONY: quickstart test test-e2e test-all lint docs bench parity install dev clean
install: $(VENV)/.installed
	@echo "mgrpo is installed in $(VENV). Next: source $(VENV)/bin/activate; mgrpo --help; make quickstart"

$(VENV)/.installed: requirements/install.sh requirements/cpu.txt requirements/gpu.txt $(NATIVE)
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
ON_ALL_CORES := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder tests/repo tests/ranks tests/unit

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(ON_ALL_CORES)
	$(PYTEST) tests/e2e/test_main_job.py

test-e2e: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" tests/e2e --ignore tests/e2e/test_main_job.py

test-all: $(VENV)/.installed-dev
	$(PYTEST) $(ON_ALL_CORES)
	$(PYTEST) tests/e2e

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
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/bench_ops.py
	$(VENV)/bin/python tools/bench_loop.py

parity: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/parity.py --markdown docs/parity.md

clean:
	rm -rf build output *.egg-info mgrpo/*.so $(VENV)/.installed $(VENV)/.installed-dev
