// The product by cp.async.
#include <array>

#include "tools/winnow/mma_product.cuh"
#include "tools/winnow/mma_product.h"

#include "winnow/device/common/copy.cuh"

namespace winnow::cli::mma_product {
namespace {

// By cp.async of all threads, kStages - 2 steps ahead.
template <class S>
class ThreadCopies {
 public:
  struct Source {
    const char *a, *b;
  };
  static constexpr bool kAddsVectors = false;

  __device__ ThreadCopies(Block<S> shared, const Product& product, const Source& source,
                          const Work& work)
      : shared_(shared), product_(product), source_(source), work_(work) {
    for (int i = 0; i < S::kStages - 2; ++i) load(i);
  }
  // Behind the barrier all warps are done with the step before the last one.
  __device__ void await(int step) {
    cp_async_wait<S::kStages - 3>();
    __syncthreads();
    load(step + S::kStages - 2);
  }
  __device__ void refill(int) const {}
  __device__ void release(int) const {}
  __device__ static int slot(int step) { return static_cast<unsigned>(step) % S::kStages; }

 private:
  __device__ void load(int step) {
    if (step < work_.steps()) {
      if (left_ == 0) {
        const Upcoming next = upcoming<S>(product_, work_, step);
        left_ = next.left;
        a_ = source_.a + offset(next.row, next.depth);
        b_ = source_.b + offset(next.column, next.depth);
      }
      copy<S::kRows>(shared_.a()[slot(step)], a_);
      copy<S::kColumns>(shared_.b()[slot(step)], b_);
      --left_;
      a_ += kTileLine;
      b_ += kTileLine;
    }
    cp_async_commit();  // empty groups count, too
  }
  // Of the unit of 16 bytes that the thread copies first.
  __device__ std::int64_t offset(int row, int depth) const {
    return (row + static_cast<int>(threadIdx.x) / 8) * stride() + depth * kTileLine +
           static_cast<int>(threadIdx.x) % 8 * kUnitBytes;
  }
  __device__ std::int64_t stride() const { return std::int64_t{2} * product_.k; }
  template <int kRows>
  __device__ void copy(Place<Tile<kRows, kDepth>> to, const char* from) const {
    constexpr int kAtOnce = kThreads / 8;  // rows
    const std::uint32_t address =
        to.unit(static_cast<int>(threadIdx.x) / 8, static_cast<int>(threadIdx.x) % 8);
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      cp_async(address + i * kAtOnce * kTileLine, from + i * kAtOnce * stride());
    }
  }

  Block<S> shared_;
  const Product& product_;
  const Source& source_;
  const Work& work_;
  const char *a_ = nullptr, *b_ = nullptr;  // what is copied next
  int left_ = 0;                            // steps of the piece
};

template <class S>
std::function<void(void* stream)> prepare(const Product& product, int blocks) {
  load_product<S, ThreadCopies>();
  const typename ThreadCopies<S>::Source source = {static_cast<const char*>(product.a),
                                                   static_cast<const char*>(product.b)};
  return [=](void* stream) { launch_product<S, ThreadCopies>(product, source, blocks, stream); };
}

}  // namespace

std::function<void(void* stream)> threads_128x256(const Product& product, int blocks) {
  using Plan = Shape<4, 256, 3>;
  static_assert(kBytes<Plan> <= kBytesOfThreads256);
  return prepare<Plan>(product, blocks);
}

std::function<void(void* stream)> threads_128x128(const Product& product, int blocks) {
  using Plan = Shape<4, 128, 3>;
  static_assert(kBytes<Plan> <= kBytesOfThreads128);
  return prepare<Plan>(product, blocks);
}

}  // namespace winnow::cli::mma_product
