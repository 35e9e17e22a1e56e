# make              install into .venv
# make quickstart   install into .venv and watch GRPO raise a small model's accuracy
# make test         the tests (installs what is missing); make test-all adds the slow ones
# make lint         ruff, mypy and clang-format
# make parity       every parallel layout against one rank, into docs/parity.md
VENV ?= .venv
NATIVE := setup.py pyproject.toml $(wildcard csrc/*.txt csrc/*/*)

.PHONY: quickstart test test-all lint bench parity install clean
install: $(VENV)/.installed
	@echo "mgrpo is installed in $(VENV). Next: source $(VENV)/bin/activate; mgrpo --help; make quickstart"

$(VENV)/.installed: requirements/install.sh requirements/cpu.txt requirements/gpu.txt $(NATIVE)
	sh requirements/install.sh $(VENV)
	touch $@

$(VENV)/.installed-dev: requirements/dev.txt requirements/judge.txt $(VENV)/.installed
	sh requirements/install.sh $(VENV) dev
	touch $@

quickstart: $(VENV)/.installed
	$(VENV)/bin/mgrpo train --nproc-per-node 2 --config examples/configs/quickstart.yaml

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -m "not slow"

test-all: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.cpp csrc/*/*.cu csrc/*/*.h tests/native/*.cpp

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/bench_ops.py
	$(VENV)/bin/python tools/bench_loop.py

parity: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(VENV)/bin/python tools/parity.py --markdown docs/parity.md

clean:
	rm -rf build output *.egg-info mgrpo/*.so $(VENV)/.installed $(VENV)/.installed-dev
