# Thin verbs over CMake. `make demo` and `make test` do everything on a fresh machine.
.PHONY: all build demo test try kernels modules simulate test-gpu test-gpu-cpp test-gpu-python soak wheel portable-wheels test-bare docs offline-deps asan tsan fuzz bench format check-format install clean help

PREFIX ?= $(CURDIR)/build/install
FUZZ_SECONDS ?= 20
# 0: another one each time.
FUZZ_SEED ?= 0
SOAK_ITERATIONS ?= 10000

all: build

help:
	@echo "make demo          build, then watch a sparse attention layer learn where to look"
	@echo "make test          build, then run all tests, C++ and Python: about 20 minutes on two cores; torch and"
	@echo "                   other Python packages come into .venv (5 GB)"
	@echo "make try OP=sparse_mla::forward  build and run the tests of one operation, its GPU kernels on the CPU too"
	@echo "make kernels       after make test, on a machine without a GPU: compile the CUDA kernels, test their code"
	@echo "make modules       the case tables in each instruction set of the CPU backend that this processor has"
	@echo "make simulate      the GPU kernels on the CPU: every case and planted bug"
	@echo "make wheel         the Python package as a wheel in build/dist"
	@echo "make portable-wheels  wheels for other machines in build/wheels; make test-bare tries them"
	@echo "make docs          the documentation as a site in build/site, its links checked"
	@echo "make test-gpu      both of the following: what needs this machine's GPU"
	@echo "make test-gpu-cpp  the case tables and the C++ tests that need a GPU"
	@echo "make soak          $(SOAK_ITERATIONS) random calls of each all-to-all on random worlds"
	@echo "make test-gpu-python  the Python tests that need a GPU, with torch"
	@echo "make bench         winnow bench: the operations beside their ceilings"
	@echo "make asan          the tests under AddressSanitizer and UBSan, without those that match ASAN_SKIP; ASAN_SIMULATOR=OFF: without the simulator"
	@echo "make tsan          the whole test suite under ThreadSanitizer"
	@echo "make fuzz          libFuzzer over tensor descriptors and the text reader ($(FUZZ_SECONDS) s)"
	@echo "make offline-deps  gather the libraries in .deps/root, for machines without package sources"
	@echo "make format        format all code; make check-format only looks, and lints Python"
	@echo "make install       the CMake package and the program, PREFIX=$(PREFIX)"
	@echo "ISAS=baseline      for make test and make asan: other instruction sets of the CPU backend"

# Warnings are errors where the compiler is known: in CI.
werror = -DWINNOW_WERROR=$(if $(CI),ON,OFF)
# CI has no GPU: that kernels compile is all that it can see.
only_compile = -DWINNOW_KERNELS_ONLY_COMPILE=$(if $(CI),ON,OFF)
# For verbs that build much and once.
once = -DWINNOW_PRECOMPILE=ON
isas = $(if $(ISAS),-DWINNOW_CPU_ISAS='$(ISAS)')
# The set that this processor uses, and the one that all have: each takes minutes to compile.
isas_of_test = -DWINNOW_CPU_ISAS='$(or $(ISAS),native;baseline)'
# Kernels take minutes to compile: what is not installed has them only beside a GPU.
cuda_if_gpu = $(if $(wildcard /dev/nvidiactl),AUTO,OFF)

build:
	@tools/setup
	@cmake --preset release -DWINNOW_TESTS=OFF -DWINNOW_CUDA=$(cuda_if_gpu) $(werror)
	@cmake --build --preset release

# No more than it needs, which is half of the time: the rest comes with the other verbs.
demo:
	@tools/setup
	@cmake --preset release -DWINNOW_TESTS=OFF -DWINNOW_CUDA=$(cuda_if_gpu) -DWINNOW_CPU_ISAS=native $(once) $(werror)
	@cmake --build --preset release --target winnow_demo_program
	build/bin/winnow-demo

bench: build
	build/bin/winnow bench

# The wheel shares the objects of build/release: it needs the same settings.
python = -DWINNOW_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python

test:
	@echo "make test: takes about 20 minutes on two cores; gets torch and other Python packages into .venv (5 GB)"
	@echo "  where they are not there yet$(if $(filter OFF,$(cuda_if_gpu)),; leaves the CUDA kernels out since there is no GPU (make kernels))"
	@tools/setup wheels python
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=$(cuda_if_gpu) $(python) $(once) $(isas_of_test) \
	  $(only_compile) $(werror)
	cmake --build --preset release
	@tools/test wheel ctest pytest

# In the objects of `make test`, of which those that know of kernels are compiled again.
kernels:
	@tools/setup wheels python
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=ON $(python) $(once) $(isas_of_test) \
	  -DWINNOW_KERNELS_ONLY_COMPILE=OFF $(werror)
	cmake --build --preset release
	@tools/test wheel kernels

# The other tests run in the module that the processor would choose.
modules:
	@tools/setup
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=$(cuda_if_gpu) $(werror)
	cmake --build --preset release --target winnow_cli
	ctest --preset release -C thorough -L '^module$$'

# The loop of whoever writes an operation: seconds after the first time.
try:
	@tools/setup
	@tools/try $(OP)

# `make test` runs a few of these. A failure prints the command that repeats it.
simulate:
	@tools/setup
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=$(cuda_if_gpu) $(once) $(werror)
	cmake --build --preset release --target simulators
	ctest --preset release -C thorough -L '^thorough$$' -j$(shell nproc)

cuda_of_wheel = AUTO
wheel:
	@tools/setup python
	cmake --preset release -DWINNOW_TESTS=OFF -DWINNOW_CUDA=$(cuda_of_wheel) $(python) $(werror)
	cmake --build --preset release
	@tools/test wheel

# For other machines, with the C++ library inside; docs/releasing.md.
portable-wheels:
	@tools/setup pip
	tools/wheel

# As root: what portable-wheels made, in systems that have Python and nothing else.
test-bare:
	@tools/setup python bare
	.venv/bin/python -m pytest python/release

# The references come from the package, which must be installed.
docs: cuda_of_wheel = $(cuda_if_gpu)
docs: wheel
	@tools/docs

# `make test` runs 300 of the first program and 60 of the second. A failure of the first names the
# WINNOW_SOAK_SEED that repeats it; one of the second names its problem, which is the same in every run.
soak:
	@tools/setup
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=$(cuda_if_gpu) $(werror)
	cmake --build --preset release --target all_to_all_soak low_latency_test
	WINNOW_SOAK_ITERATIONS=$(SOAK_ITERATIONS) build/bin/all_to_all_soak
	WINNOW_SOAK_ITERATIONS=$(SOAK_ITERATIONS) build/bin/low_latency_test --gtest_filter='*Soak*'

# Everything that a build without package sources needs, in one folder to carry along.
offline-deps:
	@tools/setup offline

expert_parallel_gpu_tests = all_to_all_gpu_test all_to_all_faults_gpu_test all_to_all_layers_gpu_test \
  combine_gpu_test dispatch_gpu_test layout_gpu_test low_latency_gpu_test \
  low_latency_faults_gpu_test notify_gpu_test nvshmem_gpu_test nvshmem_faults_gpu_test
compressor_gpu_tests = compressor_gpu_test
indexer_gpu_tests = indexer_gpu_test quantize_gpu_test topk_paged_gpu_test
paged_gpu_tests = paged_contents_gpu_test paged_gpu_test paged_graph_gpu_test
# Their instances called Gpu need one.
tests_on_each_device = notify_test notify_reject_test all_to_all_faults_test \
  all_to_all_memory_test all_to_all_refusals_test low_latency_test

# What only a GPU can test; CI has none. The last result stands in docs/verification.md.
test-gpu: test-gpu-cpp test-gpu-python

test-gpu-cpp:
	@tools/setup
	cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=ON $(werror)
	cmake --build --preset release --target winnow_cli conformance_gpu_test gpu_test backward_gpu_test decode_gpu_test \
	  mma_product_gpu_test $(compressor_gpu_tests) $(indexer_gpu_tests) \
	  $(paged_gpu_tests) $(expert_parallel_gpu_tests) $(tests_on_each_device) all_to_all_soak
	build/bin/winnow verify --device cuda
	for operation in forward distribution backward decode; do \
	  build/bin/winnow verify sparse_mla::$$operation --device cuda --backend cuda || exit 1; done
	build/bin/conformance_gpu_test
	build/bin/gpu_test --gtest_filter='*TheFirstCallMayBeCaptured*'
	build/bin/gpu_test
	build/bin/backward_gpu_test
	build/bin/decode_gpu_test
	build/bin/mma_product_gpu_test
	for test in $(compressor_gpu_tests) $(indexer_gpu_tests); do \
	  build/bin/$$test --gtest_filter='*TheFirstCallMayBeCaptured*' && build/bin/$$test || exit 1; done
	build/bin/paged_graph_gpu_test --gtest_filter='*TheFirstCallMayBeCaptured*'
	for test in $(paged_gpu_tests); do build/bin/$$test || exit 1; done
	build/bin/layout_gpu_test --gtest_filter='*TheFirstCallMayBeCaptured*'
	for test in $(expert_parallel_gpu_tests); do build/bin/$$test || exit 1; done
	for test in $(tests_on_each_device); do build/bin/$$test --gtest_filter='Gpu/*' || exit 1; done
	WINNOW_SOAK_DEVICE=cuda WINNOW_SOAK_ITERATIONS=$(SOAK_ITERATIONS) build/bin/all_to_all_soak
	WINNOW_SOAK_DEVICE=cuda WINNOW_SOAK_ITERATIONS=$(SOAK_ITERATIONS) build/bin/low_latency_test \
	  --gtest_filter='*Soak*'

test-gpu-python:
	@tools/setup python
	cmake --preset release -DWINNOW_TESTS=OFF -DWINNOW_CUDA=ON $(python) $(werror)
	cmake --build --preset release
	@tools/test wheel gpu

asan:
	@tools/setup
	cmake --preset asan $(once) $(isas) \
	  $(if $(ASAN_SIMULATOR),-DWINNOW_SIMULATOR=$(ASAN_SIMULATOR))
	cmake --build --preset asan
	ctest --preset asan -j2 $(if $(ASAN_SKIP),-E '$(ASAN_SKIP)')

tsan:
	@tools/setup
	cmake --preset tsan $(once)
	cmake --build --preset tsan
	ctest --preset tsan -j2

fuzz:
	@tools/setup fuzz
	cmake --preset fuzz
	cmake --build --preset fuzz
	build/fuzz/bin/winnow_fuzz -artifact_prefix=build/fuzz/ -max_len=4096 -len_control=0 -seed=$(FUZZ_SEED) -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096 -print_final_stats=1

sources = $(shell git ls-files '*.h' '*.cc' '*.cu' '*.cuh')

format:
	@tools/setup wheels
	.venv/bin/clang-format -i $(sources)
	.venv/bin/ruff format -q python docs tools/compare

check-format:
	@tools/setup wheels
	@echo "clang-format --dry-run -Werror <$(words $(sources)) files>"
	@.venv/bin/clang-format --dry-run -Werror $(sources)
	.venv/bin/ruff format -q --check python docs tools/compare
	.venv/bin/ruff check -q python docs tools/compare

install:
	@tools/setup
	cmake --preset release -DWINNOW_TESTS=OFF -DWINNOW_CUDA=AUTO $(werror)
	cmake --build --preset release
	cmake --install build/release --prefix $(PREFIX)

clean:
	rm -rf build
