# Two commands do everything: `make reproduce` and `make test`. `make help` lists the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Asked first for torch where no NVIDIA GPU is found: the public package index has the CUDA build for Linux, 2.7 GB. Empty: not asked.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Another torch: a pip requirement with its options, or the line that pytorch.org gives for a GPU.
TORCH ?=
# Options for JupyterLab, as in: make lab ARGS="--no-browser --port 9000"
ARGS ?=
# Where `make gpu` keeps its results: a folder of its own, so that no unit of another device is reused.
GPU_RESULTS ?= results-gpu
NEEDS := needed: Python >= 3.11 with venv, make, 3 GB of disk (on Debian: apt-get install make python3-venv)
export TORCH TORCH_INDEX

.PHONY: help gpu reproduce test lab docs bench outputs readme export clean setup extra needs hooks release check-clean check-export check-style
help:
	@echo "make reproduce   run every experiment's quick preset, print the scorecard, write report/index.html"
	@echo "make test        notebooks clean, export in sync, style and types, nbdev_test, pytest"
	@echo "make lab         open the notebooks in JupyterLab; ARGS=\"--no-browser\" passes options on"
	@echo "make gpu         check this machine's GPU, run every paper preset on it, pack the results to be sent"
	@echo "make docs        build the site (wants Quarto)"
	@echo "make bench       measure speed against peers and the machine's limit"
	@echo "make export      write fact_nb/ from the notebooks and clean them"
	@echo "make outputs     execute the notebooks and save their outputs"
	@echo "make readme      write README.md from nbs/index.ipynb"
	@echo "make setup       only the environment; TORCH=\"...\" takes the line that pytorch.org gives for your GPU"
	@echo "make extra       the optional extra as well: Hugging Face, Lightning, TensorBoard (make test adds it)"
	@echo "make hooks       git hooks for this clone: notebooks merge by cells, commits are looked at first"
	@echo "make release     build, check and tag the version of settings.ini; nothing is uploaded"
	@echo "make clean       remove the environment and everything that was built"

needs:
	@"$(PYTHON)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(NEEDS)"; exit 1; }

# The environment's own Python sees in a moment whether there is anything to do.
setup:
	@"$(BIN)/python" tools/environment.py current 2>/dev/null || { $(MAKE) --no-print-directory needs && "$(PYTHON)" tools/environment.py; }

# What the tests and the pages need beyond the core: trainers, their log files, models to try.
extra: setup
	@"$(BIN)/python" tools/environment.py current integrations || "$(BIN)/python" tools/environment.py add integrations

# All of the paper on this machine's GPU; can be stopped and started again. DEVICE=cpu tries the steps without one.
DEVICE ?= cuda
PRESET ?= paper
gpu: setup
	@"$(BIN)/fact" doctor --device $(DEVICE)
	@OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -q tests/device --device $(DEVICE)
	@"$(BIN)/fact" run all --preset $(PRESET) --device $(DEVICE) --results "$(GPU_RESULTS)" --yes --keep-going || echo "some experiments failed: 'make gpu' again continues; what is finished goes into the archive"
	@"$(BIN)/fact" report --results "$(GPU_RESULTS)" --out report/gpu.html --archive fact-gpu.tar.gz

reproduce: setup
	@"$(BIN)/fact" run all
	@"$(BIN)/fact" report

# Two processes: nbdev_test by itself, pytest by pytest-xdist (7 minutes instead of 13 on two cores).
test: extra check-clean check-export check-style
	@OMP_NUM_THREADS=1 "$(BIN)/nbdev_test" --n_workers 2
	@OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -q -n 2 tests
	@OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest -q tests/device

check-clean: setup
	@"$(BIN)/python" tools/check.py clean
check-export: setup
	@"$(BIN)/python" tools/check.py export
check-style: setup
	@"$(BIN)/ruff" check --quiet nbs fact_nb tools
	@"$(BIN)/python" tools/style.py
	@"$(BIN)/mypy"

lab: setup
	@"$(BIN)/python" -m ipykernel install --sys-prefix --name fact_nb --display-name "Python (fact_nb)" >/dev/null
	@if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; "$(BIN)/jupyter" lab nbs/index.ipynb $$root $(ARGS)

docs:
	@command -v quarto >/dev/null || { echo "the site needs Quarto, which is a program of its own: get it at https://quarto.org/docs/get-started/ and run 'make docs' again (nothing else here needs it)"; exit 1; }
	@$(MAKE) --no-print-directory extra
	@"$(BIN)/python" tools/assets.py
	@"$(BIN)/nbdev_proc_nbs"
	@cd _proc && quarto render --no-cache
	@rm -rf _docs && mv _proc/_docs _docs && echo "site: $$(pwd)/_docs/index.html"

bench: setup
	@OMP_NUM_THREADS=1 "$(BIN)/fact" bench

export: setup
	@"$(BIN)/nbdev_export" && "$(BIN)/nbdev_clean"

outputs: extra
	@OMP_NUM_THREADS=1 "$(BIN)/python" tools/outputs.py

readme: setup
	@"$(BIN)/python" tools/readme.py

hooks: setup
	@"$(BIN)/python" tools/hooks.py

release: test
	@"$(BIN)/python" tools/release.py

clean:
	@rm -rf $(VENV) _docs _proc build dist report *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find nbs fact_nb tests tools \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
