// The product by the tensor memory accelerator, sm_90 and newer.
#include "tools/winnow/mma_product.cuh"

#include "winnow/device/common/copy.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/tensor_copy.cuh"
#include "winnow/device/sm90/tensor_map.h"

namespace winnow::cli::mma_product {
namespace {

// One thread loads kStages - 1 steps ahead by TMA; each warp releases a stage that it has read.
template <class S>
class TensorCopies {
 public:
  struct Source {
    CUtensorMap a, b;
  };
  static constexpr bool kAddsVectors = true;

  __device__ TensorCopies(Block<S> shared, const Product& product, const Source& source,
                          const Work& work)
      : shared_(shared), product_(product), source_(source), work_(work) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kStages; ++i) {
        mbarrier_init(shared.full()[i].address, 1);
        mbarrier_init(shared.empty()[i].address, kWarps * kWarpArrival);
      }
      fence_mbarrier_init();
      shared.upcoming().store(make_uint4(0, 0, 0, 0));
      for (int i = 0; i < S::kStages - 1; ++i) load(i);
    }
    __syncthreads();
  }
  __device__ void await(int step) const {
    mbarrier_wait(shared_.full()[slot(step)].address, turn(step) & 1, "full", 0);
  }
  // Loads the step that is kStages - 1 ahead, into the stage of the step before this one, which
  // every warp must have released. In the first turn of the ring the stages are free.
  __device__ void refill(int step) const {
    if (threadIdx.x < 32) {
      const int next = step + S::kStages - 1;
      mbarrier_wait(shared_.empty()[slot(next)].address, turn(next) & 1 ^ 1, "empty", 0);
      if (threadIdx.x == 0) load(next);
      __syncwarp();
    }
  }
  __device__ void release(int step) const {
    mbarrier_arrive_warp(shared_.empty()[slot(step)].address);
  }
  __device__ static int slot(int step) { return static_cast<unsigned>(step) % S::kStages; }

 private:
  __device__ static unsigned turn(int step) { return static_cast<unsigned>(step) / S::kStages; }
  // Called by one thread.
  __device__ void load(int step) const {
    if (step >= work_.steps()) return;
    // Kept in shared memory, since the products leave no registers.
    const uint4 saved = ld_shared_words(shared_.upcoming().address);
    Upcoming next = {static_cast<int>(saved.x), static_cast<int>(saved.y),
                     static_cast<int>(saved.z), static_cast<int>(saved.w)};
    if (next.left == 0) next = upcoming<S>(product_, work_, step);
    const std::uint32_t full = shared_.full()[slot(step)].address;
    const std::uint64_t policy = policy_evict_normal();
    constexpr int kBytes = (S::kRows + S::kColumns) * kTileLine;
    mbarrier_arrive_expect(full, kBytes);
    tensor_load(shared_.a()[slot(step)].address, &source_.a, full, next.depth * kDepth, next.row,
                policy);
    tensor_load(shared_.b()[slot(step)].address, &source_.b, full, next.depth * kDepth, next.column,
                policy);
    shared_.upcoming().store(make_uint4(next.row, next.column, next.depth + 1, next.left - 1));
  }

  Block<S> shared_;
  const Product& product_;
  const Source& source_;
  const Work& work_;
};

CUtensorMap map_of(const void* matrix, int rows, int k, int box_rows) {
  const MapDim dims[] = {{static_cast<std::uint64_t>(k), 0, kDepth},
                         {static_cast<std::uint64_t>(rows), 2 * static_cast<std::uint64_t>(k),
                          static_cast<std::uint32_t>(box_rows)}};
  return tensor_map(kRuntime, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, matrix, dims);
}

}  // namespace

std::function<void(void* stream)> tensor_192x256(const Product& product, int blocks) {
  using Plan = Shape<6, 256, 4>;
  static_assert(kBytes<Plan> <= kBytesOfTensor192);
  load_product<Plan, TensorCopies>();
  const TensorCopies<Plan>::Source source = {
      map_of(product.a, product.m, product.k, Plan::kRows),
      map_of(product.b, product.n, product.k, Plan::kColumns)};
  return [=](void* stream) { launch_product<Plan, TensorCopies>(product, source, blocks, stream); };
}

}  // namespace winnow::cli::mma_product
