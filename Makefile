# Each target makes .venv and installs into it when that is needed. `make` alone lists them.
PYTHON ?= python3
LAB ?= 01_spatial_sharding
# On Linux an ordinary index gives torch's CUDA build, which is several GB. A machine without an NVIDIA driver has no use
# for it, so torch is first looked for here. TORCH_INDEX= (empty) leaves that out.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Another environment, as `make compat` makes: VENV=.venv-torch-2.11.0 make doctor
VENV ?= .venv
INSTALLED := $(VENV)/.installed
VENV_PYTHON := $(VENV)/bin/python
# `python -m` rather than the scripts of .venv/bin, whose first line is of no use where the path is long or has blanks.
RUN := $(VENV_PYTHON) -m

.DEFAULT_GOAL := help
.PHONY: help run lab update reset progress notebooks book workshop dist doctor check test compat compat-here nightly colab \
	cuda-build lint clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

run: $(INSTALLED) ## the main job: execute lab 1 and leave the notebook, HTML and figures in out/
	@$(VENV_PYTHON) -m notebooks.tools.run $(LAB)

lab: $(INSTALLED) ## open JupyterLab on lab 0 of your own copies in my/; LAB=02_fsdp_wrapping opens another
	@$(RUN) labkit lab $(if $(filter file,$(origin LAB)),00_ranks,$(LAB))

update: $(INSTALLED) ## after a git pull: bring what is new in the labs into your copies; what you wrote stays
	@$(RUN) labkit update

reset: $(INSTALLED) ## a fresh copy of one lab, LAB=02_fsdp_wrapping; yours is kept in my/earlier/
	@test "$(origin LAB)" != file || { echo "Say which lab: make reset LAB=02_fsdp_wrapping" >&2; exit 2; }
	@$(RUN) labkit reset $(LAB)

progress: $(INSTALLED) ## which exercises have passed
	@$(RUN) labkit progress

notebooks: $(INSTALLED) ## write the learner's and the solved notebooks again from notebooks/src
	@$(VENV_PYTHON) -m notebooks.tools.build

book: $(VENV)/.book-installed ## the solved labs, formulas, API and troubleshooting as web pages, in out/book/index.html
	@$(RUN) docs.book

# The wheels are for this Python on this kind of machine. Where there is no GPU, torch's CPU build is looked for first.
WORKSHOP := out/workshop
workshop: $(INSTALLED) ## a folder for machines without a network, from the last commit: out/workshop/install.sh
	@git rev-parse --verify -q HEAD >/dev/null || { echo "make workshop packs a clone's last commit, and this is none" >&2; exit 1; }
	@rm -rf $(WORKSHOP) && mkdir -p $(WORKSHOP)/wheels
	@git archive HEAD | tar -x -C $(WORKSHOP)
	@cp $(WORKSHOP)/docs/install_workshop.sh $(WORKSHOP)/install.sh
	@echo '$(MADE_FOR)' > $(WORKSHOP)/wheels/made-for.py && $(VENV_PYTHON) -c '$(MADE_FOR)' > $(WORKSHOP)/wheels/made-for
	@[ -z "$(TORCH_INDEX)" ] || [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null \
		|| $(RUN) pip download -q --no-deps --timeout 5 --retries 0 --index-url $(TORCH_INDEX) -c $(PINS) -d $(WORKSHOP)/wheels torch \
		2>/dev/null || true
	@$(RUN) pip wheel -q --disable-pip-version-check -c $(PINS) -f $(WORKSHOP)/wheels -w $(WORKSHOP)/wheels '.[dev]' 'setuptools>=77'
	@echo "$$(du -sh $(WORKSHOP) | cut -f1) in $(WORKSHOP) for $$(cat $(WORKSHOP)/wheels/made-for). There: ./install.sh 0 1 2"
MADE_FOR := import platform as p; print("Python", *p.python_version_tuple()[:2], p.system(), p.machine())

# The wheel comes from the sdist, so that whoever has only the sdist gets the same.
dist: $(INSTALLED) ## the sdist and the wheel, in dist/, as a package index takes them
	@rm -rf dist
	@$(VENV_PYTHON) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	@$(RUN) pip wheel -q --no-deps --no-build-isolation --no-index -w dist dist/*.tar.gz
	@ls dist

doctor: $(INSTALLED) ## what this machine can do, and what to mend
	@$(RUN) labkit doctor

# Without bytecode on disk each of a test's processes would compile all files again: make check takes a quarter longer.
check test compat-here: export PYTHONDONTWRITEBYTECODE :=

# Tests run in four parts, because some disturb each other. A failed part does not keep the next from running. The marks
# are explained in pyproject.toml; CALM and ALONE spare pytest the reading of files that hold none of the part's tests.
CLUSTER := slurmctld slurmd slurm-client munge openssh-server iproute2
CALM := tests/browser tests/cluster tests/test_notebooks.py tests/test_process.py tests/test_warm_start.py
ALONE := tests/browser tests/test_benchmarks.py tests/test_comparison.py tests/test_core_use.py tests/test_emulated.py tests/test_fsdp.py tests/test_simple_fsdp.py tests/test_timeline.py tests/test_use.py tests/test_widgets*.py
# Ranks wait for each other, so three files keep two cores busy; the long tests compile, and two are enough.
LONG := $(if $(ALL),all,$(if $(TODAY),today))
FILES := -n $(if $(LONG),2,3) --dist loadfile --no-loadscope-reorder
define run-parts
	@failed=; \
	$(RUN) pytest $(FILES) -m "not calm and not alone$(1)" --ignore tests/test_mutants.py || failed="$$failed, side by side"; \
	$(RUN) pytest -n 2 --dist loadgroup -m "calm$(1)" $(CALM) || failed="$$failed, calm"; \
	$(RUN) pytest -m "alone$(1)" $(ALONE) || failed="$$failed, alone"; \
	$(RUN) pytest -n 2 tests/test_mutants.py || failed="$$failed, mutants"; \
	[ -z "$$failed" ] || { echo "Parts of the tests that failed: $${failed#, }. The others passed." >&2; exit 1; }
endef

check: lint ## what to run before each commit, 90 s: style, types, layers, and all tests that start no process
	@$(RUN) pytest -q -p tests.fixture_quick $(FILES) -m "not browser and not calm and not long" --timeout 10

test: export LABKIT_TEST := $(LONG)
test: $(INSTALLED) ## all kinds of tests in 12 minutes; TODAY=1 adds a seventh of what takes long, as CI does, ALL=1 all of it
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } </dev/null \
		|| echo "No Chromium could be installed: the browser tests will be skipped." >&2
	@{ command -v slurmd && command -v sshd && command -v ip; } >/dev/null \
		|| [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CLUSTER); } </dev/null \
		|| echo "Not all could be installed of $(CLUSTER): tests of hosts and jobs will be skipped." >&2
	@[ -z "$(LONG)" ] || $(MAKE) --no-print-directory $(VENV)/grade/.installed \
		|| echo "No nbgrader could be installed: its tests will be skipped." >&2
	@[ -z "$(LONG)" ] || $(MAKE) --no-print-directory $(VENV)/.book-installed \
		|| echo "No Sphinx could be installed: the tests of the book will be skipped." >&2
	$(call run-parts)

# Given on the command line or not: another Python has an environment of its own, and so has another torch.
OTHER_PYTHON := $(if $(filter file,$(origin PYTHON)),,-$(notdir $(PYTHON)))
compat: ## all tests but those in a browser under another Python, torch, or both: make compat PYTHON=python3.13 TORCH=2.11.0
	@test "$(origin PYTHON) $(origin TORCH)" != "file file" || { \
		echo "Say under which Python or torch: make compat PYTHON=python3.13, or make compat TORCH=2.11.0" >&2; exit 2; }
	@$(MAKE) --no-print-directory VENV=.venv$(OTHER_PYTHON)-torch-$(TORCH) compat-here

compat-here: export LABKIT_TEST := $(LONG)
compat-here: $(INSTALLED)
	@$(RUN) labkit doctor || true  # a torch that is too new is tried all the same
	$(call run-parts, and not browser)

NIGHTLY ?= --pre --index-url https://download.pytorch.org/whl/nightly/cpu torch
nightly: ## what tomorrow's PyTorch breaks, as a list in out/nightly.txt; NIGHTLY=torch==2.14.1 tries a release
	@$(MAKE) --no-print-directory VENV=.venv-nightly .venv-nightly/.installed
	@.venv-nightly/bin/python -m pip install -q --upgrade --timeout 20 --retries 0 $(NIGHTLY) || { \
		echo "That PyTorch cannot be installed here: pip install $(NIGHTLY)" >&2; exit 1; }
	@mkdir -p out
	@{ $(MAKE) --no-print-directory VENV=.venv-nightly compat-here 2>&1; echo $$? > out/nightly.status; } | tee out/nightly.log
	@grep -E '^(FAILED|ERROR) ' out/nightly.log | sort -u > out/nightly.txt; exit $$(cat out/nightly.status)

# A learner's notebook installs labkit by its first cell. LABKIT_WIDGETS=1 has explorers show their controls.
COLAB_LABS := 00_ranks 01_spatial_sharding 02_fsdp_wrapping
colab: dist ## labs 0 to 2, solved, with the versions that Google Colab has: make colab PYTHON=python3.13
	@$(PYTHON) -m venv --clear .venv-colab
	@.venv-colab/bin/python -m pip install -q --disable-pip-version-check -r .ci/colab.txt
	@mkdir -p out/colab && cp dist/*.whl notebooks/00_ranks.ipynb out/colab
	@cd out/colab && ../../.venv-colab/bin/python -m papermill --no-progress-bar -k python3 00_ranks.ipynb 00_ranks.ipynb
	@cd out/colab && for lab in $(COLAB_LABS); do \
		LABKIT_STRICT_CLAIMS=1 LABKIT_WIDGETS=1 ../../.venv-colab/bin/python -m papermill --no-progress-bar -k python3 \
			../../notebooks/solved/$$lab.ipynb $$lab.ipynb || exit 1; \
	done

cuda-build: $(INSTALLED) ## launch with torch's CUDA build (7 GB) where it seems to find GPUs: for Linux, as root, without one
	@$(MAKE) --no-print-directory VENV=.venv-cuda TORCH_INDEX= .venv-cuda/.installed
	@.venv-cuda/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' || { \
		echo "pip found a torch without CUDA: remove .venv-cuda, and let pip ask PyPI (PIP_FIND_LINKS=, PIP_CONFIG_FILE=)" >&2; \
		exit 1; }
	@.venv-cuda/bin/python -m pytest -v -s tests/test_cuda_build.py

lint: $(INSTALLED) ## style, types and layers
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy
	@$(VENV_PYTHON) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-logo

clean: ## remove what was generated, except notebooks; .venv as well
	rm -rf .venv .venv-* build dist out runs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# nbgrader sees the packages of $(VENV), which do not see it: it would change every JupyterLab there.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(VENV)/grade/.installed: $(INSTALLED)
	@$(VENV_PYTHON) -m venv $(VENV)/grade
	@$(VENV_PYTHON) -c '$(SITE)' > "$$($(VENV)/grade/bin/python -c '$(SITE)')/others.pth"
	@$(VENV)/grade/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt nbgrader
	@touch $@

# Sphinx is for the book alone, so that nothing else waits for it.
$(VENV)/.book-installed: $(INSTALLED)
	@$(PIP) -q -e '.[book]'
	@$(RUN) docs.book.browser_python
	@touch $@

# With TORCH, the pinned versions but another torch, which may want another setuptools.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
PINS := $(VENV)/constraints.txt
PIP := $(VENV_PYTHON) -m pip install --disable-pip-version-check -c $(PINS)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "labkit needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.12 (or another) $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@sed 's/^torch==.*/torch==$(TORCH)/$(if $(filter file,$(origin TORCH)),,; s/^setuptools==.*/setuptools>=77,<82/)' constraints.txt > $(PINS)
	@echo "Installing into $(VENV); the first time takes some minutes."
	@[ -z "$(TORCH_INDEX)" ] || [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null \
		|| $(VENV_PYTHON) -c 'import torch' 2>/dev/null \
		|| $(PIP) -q --no-deps --timeout 5 --retries 0 --index-url $(TORCH_INDEX) torch 2>/dev/null \
		|| true  # an ordinary index has it, too
	@$(PIP) -e '.[dev]'
	@touch $@
