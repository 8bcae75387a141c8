// The scratch memory of the CPU backend is what the headers say, also of a single thread.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>
#include <malloc.h>

#include "winnow/core/parallel.h"
#include "winnow/indexer/topk/topk.h"
#include "winnow/sparse_mla/decode/decode.h"
#include "winnow/sparse_mla/test_problem.h"

namespace {

std::atomic<long> g_bytes = 0, g_peak = 0;

void* allocate(std::size_t bytes) {
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  const long now = g_bytes += static_cast<long>(malloc_usable_size(memory));
  if (now > g_peak) g_peak = now;
  return memory;
}

void release(void* memory) {
  if (memory != nullptr) g_bytes -= static_cast<long>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// The allocations of the whole program, the library's included. Eigen takes its matrices, whose
// size does not depend on topk or the number of rows, from malloc().
void* operator new(std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }

namespace winnow {
namespace {

// The most bytes that call() had at a time.
template <class Call>
long peak_bytes(int threads, const Call& call) {
  set_num_threads(threads);
  call();  // creates the threads
  const long before = g_bytes;
  g_peak = before;
  call();
  return g_peak - before;
}

}  // namespace
}  // namespace winnow

namespace winnow::sparse_mla {
namespace {

constexpr std::int64_t kTopk = 1 << 20;

// The same for each entry of topk and each thread.
template <class Call>
double bytes_per_entry(int threads, const Call& call) {
  return static_cast<double>(peak_bytes(threads, call)) / kTopk / threads;
}

// Indices of which none is a row, so that a call takes no time.
void see_nothing(Tensor& indices) { std::ranges::fill(indices.values<std::int32_t>(), -1); }

TEST(Scratch, OfAnEntryOfTopk) {
  TestProblem problem({.s_q = 2, .h_q = 1, .topk = kTopk});
  see_nothing(problem.indices);
  const Tensor q(DType::bf16, {1, 2, 1, 576}), cache(DType::u8, {1, 1, 1, 656});
  Tensor indices(DType::i32, {1, 2, kTopk}), out(DType::bf16, {1, 2, 1, 512});
  see_nothing(indices);
  for (const int threads : {1, 2}) {
    EXPECT_NEAR(bytes_per_entry(threads, [&] { forward(ForwardOp::args(problem)); }), 8, 0.1);
    EXPECT_NEAR(bytes_per_entry(threads, [&] { distribution(DistributionOp::args(problem)); }), 8,
                0.1);
    const DecodeArgs step{.q = q, .cache = cache, .indices = indices, .out = out};
    EXPECT_NEAR(bytes_per_entry(threads, [&] { decode(step); }), 4, 0.1);
  }
}

}  // namespace
}  // namespace winnow::sparse_mla

namespace winnow::indexer {
namespace {

// Whatever topk, the rows and the queries are: 8 MiB, and 4 MiB for each thread.
TEST(Scratch, OfTheChoiceOfRows) {
  constexpr long kMiB = 1 << 20;
  // A thread's matrices: the heads of eight queries, 256 keys, and their products.
  constexpr long kOfEigen = ((8 * 128 + 256) * 128 + 8 * 128 + 128 * 256) * long{sizeof(float)};
  struct Shape {
    std::int64_t s_q, h, d, s_k, topk;
  };
  for (const Shape& shape : {Shape{40, 128, 128, 300, 64}, Shape{3, 1, 64, 40000, 2048},
                             Shape{1, 1, 64, 40000, 32768}, Shape{9, 128, 128, 300, 32768},
                             Shape{2, 1, 64, 40000, 40000}, Shape{1, 1, 64, 300, 10000000}}) {
    const Tensor q(DType::f32, {shape.s_q, shape.h, shape.d}), k(DType::f32, {shape.s_k, shape.d}),
        weights(DType::f32, {shape.s_q, shape.h});
    Tensor indices(DType::i32, {shape.s_q, shape.topk}), length(DType::i32, {shape.s_q});
    for (const int threads : {1, 2, 5}) {
      const long bytes = peak_bytes(threads, [&] {
        topk({.q = q, .k = k, .weights = weights, .indices = indices, .length = length});
      });
      EXPECT_LE(bytes, 8 * kMiB + threads * (4 * kMiB - kOfEigen))
          << "s_q " << shape.s_q << ", topk " << shape.topk << ", " << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace winnow::indexer
