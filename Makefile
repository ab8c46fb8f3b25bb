# Two commands do everything: `make reproduce` and `make test`. `make help` lists the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEEDS := needed: Python >= 3.11 with venv, make, 3 GB of disk (on Debian: apt-get install make python3-venv)
STAMP := $(VENV)/.installed
# No stamp: an install was interrupted, so the environment is made anew.
# The environment is up to date when the stamp holds the hash of these three files (and this folder: scripts in .venv carry its path).
HASH = $$( { echo "$(CURDIR)"; cat settings.ini setup.py constraints.txt; } | cksum )

.PHONY: help reproduce test lab docs bench outputs readme export clean setup needs check-clean check-export
help:
	@echo "make reproduce   run every experiment's quick preset, print the scorecard, write report/index.html"
	@echo "make test        notebooks clean, export in sync, nbdev_test, pytest"
	@echo "make lab         open the notebooks in JupyterLab"
	@echo "make docs        build the site (wants Quarto)"
	@echo "make bench       measure speed against peers and the machine's limit"
	@echo "make export      write fact_nb/ from the notebooks and clean them"
	@echo "make outputs     execute the notebooks and save their outputs"
	@echo "make readme      write README.md from nbs/index.ipynb"
	@echo "make clean       remove the environment and everything that was built"

needs:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(NEEDS)"; exit 1; }
	@[ -e $(STAMP) ] || [ "$$(df -Pk . | awk 'NR==2 {print $$4}')" -ge 3000000 ] || { echo "$(NEEDS)"; exit 1; }

setup: needs
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(HASH)" ]; then \
	  echo "setting up $(VENV) (once; some minutes)"; \
	  { [ -e $(STAMP) ] && head -1 $(BIN)/pip 2>/dev/null | grep -qF "$(CURDIR)/"; } || $(PYTHON) -m venv --clear $(VENV) || exit 1; \
	  rm -f $(STAMP); \
	  PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -e '.[dev]' || exit 1; \
	  echo "$(HASH)" > $(STAMP); \
	fi

reproduce: setup
	@$(BIN)/fact run all
	@$(BIN)/fact report

# Two processes: nbdev_test by itself, pytest by pytest-xdist (7 minutes instead of 13 on two cores).
test: setup check-clean check-export
	@OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers 2
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests

check-clean: setup
	@$(BIN)/python tools/check.py clean
check-export: setup
	@$(BIN)/python tools/check.py export

lab: setup
	@$(BIN)/python -m ipykernel install --sys-prefix --name fact_nb --display-name "Python (fact_nb)" >/dev/null
	@$(BIN)/jupyter lab nbs

docs:
	@command -v quarto >/dev/null || { echo "the site needs Quarto, which is a program of its own: get it at https://quarto.org/docs/get-started/ and run 'make docs' again (nothing else here needs it)"; exit 1; }
	@$(MAKE) --no-print-directory setup
	@$(BIN)/nbdev_proc_nbs
	@cd _proc && quarto render --no-cache
	@rm -rf _docs && mv _proc/_docs _docs && echo "site: $(CURDIR)/_docs/index.html"

bench: setup
	@OMP_NUM_THREADS=1 $(BIN)/fact bench

export: setup
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean

outputs: setup
	@OMP_NUM_THREADS=1 $(BIN)/python tools/outputs.py

readme: setup
	@$(BIN)/python tools/readme.py

clean:
	@rm -rf $(VENV) _docs _proc build dist report *.egg-info .pytest_cache
	@find nbs fact_nb tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
