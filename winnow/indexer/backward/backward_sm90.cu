// Backward of the indexer, sm90: the launches.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/indexer/backward/backward_impl.h"
#include "winnow/indexer/backward/backward_launch.h"
#include "winnow/indexer/backward/backward_sm90.cuh"

namespace winnow::indexer {
namespace {

using namespace backward_sm90_detail;

constexpr device::Runtime kRuntime{"indexer::backward", "sm90"};

template <int kChunks, bool kF8, bool kFixed>
void launch_products(const Params& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = Plan<kChunks>::kBytes;
  const unsigned blocks = std::min(p.items, 2 * static_cast<unsigned>(multiprocessors));
  const auto kernel = backward_kernel<kChunks, kF8, kFixed>;
  kRuntime.allow_all_shared_memory(kernel, kBytes);
  kRuntime.launch(kernel, blocks, kThreads, kBytes, stream, p);
}

// Calls function(chunks, f8, fixed) with the constants that the problem asks for.
template <class Function>
void with_kernel(const BackwardParams& params, const Function& function) {
  const auto choose = [](bool value, const auto& then) {
    value ? then(std::true_type()) : then(std::false_type());
  };
  choose(params.problem.dtype == DType::f8_e4m3, [&](auto f8) {
    choose(params.deterministic, [&](auto fixed) {
      if (params.problem.d == 128) {
        function(std::integral_constant<int, 2>(), f8, fixed);
      } else {
        function(std::integral_constant<int, 1>(), f8, fixed);
      }
    });
  });
}

}  // namespace

void backward_sm90(const BackwardParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  gpu::run_backward<NumberOf, DType::bf16>(
      kRuntime, params, workspace, queue, [&](const Params& p, int multiprocessors) {
        with_kernel(params, [&](auto chunks, auto f8, auto fixed) {
          launch_products<decltype(chunks)::value, decltype(f8)::value, decltype(fixed)::value>(
              p, multiprocessors, queue);
        });
      });
}

}  // namespace winnow::indexer
