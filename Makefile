# Every target works from a clean clone: it builds the .venv that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STORE_TESTS := $(addprefix tests/,storage/clouds.py storage/test_object_folder.py e2e/test_object_store.py maintenance/test_push_pull.py formats/test_open_remote.py build/test_commit.py)

.PHONY: demo test lint lowest beside walks bench bench-revisions bench-layouts bench-loader crash cluster differ trainers interop stores browser pictures docs clean

demo: $(VENV)/.core
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests at the lowest versions that pyproject.toml allows. Of that age, typer imports what a newer click deprecates,
# and Ray leaves files open and announces its future.
LOWEST_WARNINGS := -W "ignore:'click.utils:DeprecationWarning" -W ignore::ResourceWarning -W ignore:Tip:FutureWarning
lowest: .venv-lowest/.done
	.venv-lowest/bin/python -m pytest -n 2 --dist loadgroup $(LOWEST_WARNINGS) tests

# Does pip find versions with which tokenmill and a trainer's packages can be installed together? Installs nothing.
beside: .venv-beside/.done
	.venv-beside/bin/python tools/beside.py $(ARGS)

# How many files a prepare, a first batch and an export run through.
walks: $(VENV)/.core
	$(BIN)/python tools/walks.py $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/prepare.py $(ARGS)

# This revision beside a clone of another one: make bench-revisions ARGS="--other ../older"
bench-revisions: $(VENV)/.bench
	$(BIN)/python benchmarks/revisions.py $(ARGS)

bench-layouts: $(VENV)/.bench
	$(BIN)/python benchmarks/layouts.py $(ARGS)

bench-loader: $(VENV)/.bench $(VENV)/.loaders .venv-peers/.done
	$(BIN)/python benchmarks/loader.py $(ARGS)

crash: $(VENV)/.test
	-$(PIP) --group crash
	$(BIN)/python tests/crash/run.py $(ARGS)

# `prepare --hosts` on hosts in network namespaces, disturbed in every way. Needs root; installs OpenSSH and iproute2.
cluster: $(VENV)/.test
	command -v sshd ip >/dev/null || ls /usr/sbin/sshd /usr/sbin/ip >/dev/null 2>&1 || apt-get install -y --no-install-recommends openssh-server openssh-client iproute2
	$(BIN)/python tests/cluster/run.py $(ARGS)

# The lab of differences: what the package computes against independent computations of the same.
differ: $(VENV)/.test
	$(BIN)/python tests/differ/run.py $(ARGS)

# Real training in each framework, killed and resumed: make trainers ARGS="torch lightning"
trainers: $(VENV)/.test
	$(BIN)/python tests/trainers/run.py $(ARGS)

interop: $(VENV)/.core
	sh interop/run.sh $(ARGS)

# The tests with a bucket again, against Azure's emulator and in Google's language. Needs npm.
stores: $(VENV)/.test $(VENV)/.stores .venv-azurite/.done
	$(BIN)/python -m pytest --store az $(STORE_TESTS)
	$(BIN)/python -m pytest --store gs $(STORE_TESTS)

# The viewer in Debian's chromium, with axe-core: make browser PICTURES=/tmp/pictures saves what it sees. Needs apt and npm.
browser: $(VENV)/.test .venv-browser/.done
	$(PIP) --group browser
	PICTURES=$(PICTURES) $(BIN)/python -m pytest tests/browser/check_viewer.py

# The pictures in docs/, of a real run.
pictures: $(VENV)/.core .venv-browser/.done
	$(PIP) --group browser
	$(PIP) --editable ".[view]"
	$(BIN)/python tools/pictures.py

# What is generated: the command reference, and the tree and the walks in CONTRIBUTING.md.
docs: $(VENV)/.core
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .venv-* demo-data

# pip compiles what it installs, but for what is editable: without that, every start of ours would where Python may not.
$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --editable .
	$(BIN)/python -m compileall -q src
	touch $@

# One group of development tools each, on top of the package itself.
$(VENV)/.%: $(VENV)/.core
	$(PIP) --group $*
	touch $@

.venv-lowest/.done: pyproject.toml tools/lowest.py
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-lowest/bin/python tools/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/constraints.txt --editable ".[ray]" --group test
	touch $@

.venv-beside/.done: Makefile
	$(PYTHON) -m venv .venv-beside
	.venv-beside/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

# litData and Mosaic streaming in an environment of their own. If they do not install, the benchmark says so.
.venv-peers/.done: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	-.venv-peers/bin/python -m pip install --quiet --group peers
	touch $@

.venv-azurite/.done: Makefile
	npm install --silent --no-audit --no-fund --prefix .venv-azurite azurite@3.35.0
	touch $@

.venv-browser/.done: Makefile
	command -v chromium || (apt-get update && apt-get install --yes chromium)
	npm install --silent --no-audit --no-fund --prefix .venv-browser axe-core@4
	touch $@
