// Each lambda is a kernel, of which `smem` is the first of kSharedBytes of shared memory.
#include <cuda_runtime.h>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm100/operand.cuh"
#include "winnow/device/sm100/tcgen05.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/simulator/engine_faults.h"

namespace winnow::engine_faults {
namespace {

using namespace winnow::device;
using Words = std::uint32_t*;
using Address = std::uint32_t;

constexpr Runtime kRuntime{"engine_faults", "simulator"};
constexpr std::size_t kSharedBytes = 16384;

template <class Body>
__global__ void faulty_kernel(Words words) {
  Body{}(shared_address(dynamic_shared<1024>()), words);
}

struct RingMemory {
  std::uint32_t items[4];
  Barrier full[2][3];
};
struct Ring : Shared<RingMemory> {
  WINNOW_PLACE(full)
};

struct Shape {
  unsigned threads = 32, blocks = 1;
  unsigned cluster = 0;  // 0: all blocks
  bool early = false;
};

template <class Body>
void launch_body(const Shape& shape, Words words) {
  const unsigned cluster = shape.cluster == 0 ? shape.blocks : shape.cluster;
  const auto queue = [&](const auto&... attributes) {
    kRuntime.check(
        launch_with(std::array{in_clusters(cluster), attributes...}, faulty_kernel<Body>,
                    dim3(shape.blocks), dim3(shape.threads), kSharedBytes, nullptr, words),
        "launch");
  };
  shape.early ? queue(early()) : queue();
  kRuntime.check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

template <class Body>
Fault fault(const char* name, const char* check, const char* says, Body, Shape shape = {}) {
  return {name, check, says, [shape](Words words) { launch_body<Body>(shape, words); }};
}

unsigned thread() { return threadIdx.x; }

void init(Address barrier, std::uint32_t count) {
  if (thread() == 0) {
    mbarrier_init(barrier, count);
    fence_mbarrier_init();
  }
  __syncthreads();
}

// Others run meanwhile. Nobody arrives at the barrier.
void wait_a_while(Address barrier) {
  for (int i = 0; i < 500; ++i) mbarrier_try_wait(barrier, 0);
}

std::vector<Fault> memory_faults() {
  return {
      fault("SharedOutOfBounds", "shared memory", "is outside of the block's shared memory",
            [](Address smem, Words) { ld_shared<std::uint32_t>(smem + kSharedBytes); }),
      fault("SharedMisaligned", "shared memory", "is not a multiple of them",
            [](Address smem, Words) { ld_shared<std::uint32_t>(smem + 2); }),
      fault("GlobalOutOfBounds", "global memory", "is outside of the device's allocations",
            [](Address, Words words) { words[kFaultWords] = 1; }),
      fault("GlobalByAPointerThatNobodySet", "global memory",
            "is outside of the device's allocations",
            [](Address, Words words) { *reinterpret_cast<Words>(~std::uintptr_t{words[0]}) = 1; }),
      fault("GlobalMisaligned", "global memory", "is not a multiple of",
            [](Address, Words words) { words[0] = load_once(words + 1).x; }),
      fault("StoreAndLoadWithoutBarrier", "race", "is not ordered behind a",
            [](Address smem, Words) {
              if (thread() == 0) st_shared(smem, 1u);
              if (thread() == 32) ld_shared<std::uint32_t>(smem);
            },
            {.threads = 64}),
      fault("LoadAndStoreWithoutBarrier", "race", "is not ordered behind a read by thread 0",
            [](Address smem, Words) {
              st_shared(smem + 4 * thread(), 1u);
              __syncwarp();
              if (thread() == 0) ld_shared<std::uint32_t>(smem + 4);
              if (thread() == 1) st_shared(smem + 4, 1u);
            }),
      fault("StoreBehindALoadThatManyLoadsHaveFollowed", "race",
            "is not ordered behind a read by thread 1",
            [](Address smem, Words) {
              constexpr unsigned kOthers = ~2u;
              if (thread() == 0) st_shared(smem, 0u), st_shared(smem + 4, 0u);
              __syncwarp();
              if (thread() == 1) ld_shared<std::uint32_t>(smem + 4);
              __ballot_sync(~0u, true);  // orders nothing
              if (thread() == 1) return;
              for (unsigned i = 0; i < 1000; ++i) {
                ld_shared<std::uint32_t>(smem);
                __syncwarp(kOthers);
                if (thread() == 0) st_shared(smem, i);
                __syncwarp(kOthers);
              }
              if (thread() == 0) st_shared(smem + 4, 1u);
            }),
      fault("AtomicsBehindAStore", "race", "is not ordered behind a write by thread 0",
            [](Address, Words) {
              WINNOW_BLOCK_SHARED(counter, int);
              if (thread() == 0) counter = 0;
              if (thread() == 0) atomicAdd(&counter, 1);  // which must not hide the store
              if (thread() == 1) atomicAdd(&counter, 1);
            }),
      fault("PointersWithoutBarrier", "race", "(a store, engine_faults.cu:",
            [](Address, Words words) {
              WINNOW_BLOCK_SHARED(word, std::uint32_t);
              if (thread() == 0) word = 1;
              if (thread() == 1) words[0] = word;
            }),
      fault("PointerOutOfBounds", "global memory",
            "at engine_faults.cu:", [](Address, Words words) { words[0] = words[kFaultWords]; }),
      fault("StoreWithoutProxyFence", "proxy fence", "without a proxy fence between them",
            [](Address smem, Words words) {
              st_shared(smem + 4 * thread(), thread());
              __syncwarp();
              if (thread() != 0) return;
              bulk_store(words, smem, 16, policy_evict_first());
              bulk_commit();
              bulk_wait<0>();
            }),
      fault("StoreBehindTheProxyFenceOfGlobalMemory", "proxy fence",
            "without a proxy fence between them",
            [](Address smem, Words words) {
              if (thread() != 0) return;
              for (Address at = 0; at < 16; at += 4) st_shared(smem + at, 0u);
              fence_proxy_async_global();
              bulk_store(words, smem, 16, policy_evict_first());
              bulk_commit();
              bulk_wait<0>();
            }),
  };
}

std::vector<Fault> barrier_faults() {
  return {
      fault("BarrierWithoutInitialisation", "mbarrier", "was not initialised",
            [](Address smem, Words) { mbarrier_wait(smem, 0, "consume", 0); }),
      fault("SecondInitialisation", "mbarrier", "is initialised a second time",
            [](Address smem, Words) {
              if (thread() == 0) mbarrier_init(smem, 1), mbarrier_init(smem, 1);
            }),
      fault("CountOfZero", "mbarrier", "a count of 0",
            [](Address smem, Words) { mbarrier_init(smem, 0); }),
      fault("InitialisationWithoutFence", "mbarrier", "no fence.mbarrier_init has followed",
            [](Address smem, Words) {
              if (thread() == 0) mbarrier_init(smem, 32);
              __syncthreads();
              mbarrier_arrive(smem);
            }),
      fault("InitialisationThatNothingOrders", "mbarrier",
            "nothing orders behind its initialisation",
            [](Address smem, Words) {
              if (thread() == 0) mbarrier_init(smem, 32), fence_mbarrier_init();
              mbarrier_arrive(smem);
            }),
      fault("MoreArrivalsThanTheCount", "mbarrier", "more arrivals than the count",
            [](Address smem, Words) {
              init(smem, 1);
              if (thread() == 0) mbarrier_arrive_expect(smem, 16), mbarrier_arrive(smem);
            }),
      fault("ParityOfTwo", "mbarrier", "a wait for parity 2",
            [](Address smem, Words) {
              init(smem, 1);
              mbarrier_wait(smem, 2, "consume", 0);
            }),
      fault("NobodyArrives", "deadlock", "warps 0 to 2, wait as \"consume\"",
            [](Address smem, Words) {
              init(smem, 1);
              mbarrier_wait(smem, 0, "consume", 0);
            },
            {.threads = 96}),
      fault("NobodyArrivesAtTheSixth", "deadlock",
            "of the mbarrier full[1][2], which misses 1 of 1",
            [](Address smem, Words) {
              const Ring ring{smem};
              if (thread() == 0) {
                for (int i = 0; i < 6; ++i) ring.full()[i / 3][i % 3].init(1);
                fence_mbarrier_init();
              }
              __syncwarp();
              ring.full()[1][2].wait(0, "consume", 0);
            }),
      fault("NobodyStoresTheFlag", "deadlock", "in a loop that looks again and again",
            [](Address, Words words) {
              while (ld_acquire_gpu(words) == 0) {
              }
            }),
      fault("EarlyKernelThatDoesNotWait", "launch", "without griddepcontrol.wait",
            [](Address, Words) {}, {.early = true}),
      fault("LanesWithOtherMasks", "warp", "while other lanes are at",
            [](Address, Words) { __shfl_sync(thread() == 0 ? 3u : ~0u, 1, 0); }),
      fault("LanesOfOtherKinds", "warp", "while other lanes are at",
            [](Address, Words) {
              if (thread() % 2 == 0) {
                __syncwarp();
              } else {
                __ballot_sync(~0u, true);
              }
            }),
      fault("LaneThatItsMaskDoesNotName", "warp", "which is not in it",
            [](Address, Words) { __syncwarp(1u); }),
      fault("NamedBarrierOfOtherCounts", "named barrier", "while others are at it",
            [](Address, Words) {
              if (thread() < 32) {
                bar_sync<64>(1);
              } else {
                bar_sync<96>(1);
              }
            },
            {.threads = 64}),
      fault("TooFewRegisters", "setmaxnreg", "not a multiple of 8 from 24 to 256",
            [](Address, Words) { setmaxnreg_dec<20>(); }),
      fault("MoreRegistersAfterDec", "setmaxnreg",
            "dec to 136 registers, and the warp has at most 128",
            [](Address, Words) { setmaxnreg_dec<136>(); }, {.threads = 512}),
      fault("FewerRegistersAfterInc", "setmaxnreg", "inc to 40 registers, and the warp has 56",
            [](Address, Words) {
              setmaxnreg_dec<56>();
              setmaxnreg_inc<40>();
            }),
      fault("Trap", "trap", "", [](Address, Words) { __trap(); }),
      fault("GridOfHalfACluster", "launch", "clusters of 2 blocks in a grid of 3",
            [](Address, Words) {}, {.blocks = 3, .cluster = 2}),
  };
}

std::vector<Fault> exit_faults() {
  return {
      fault("BytesStillExpected", "exit", "still expects 16 bytes",
            [](Address smem, Words) {
              init(smem, 1);
              if (thread() == 0) mbarrier_arrive_expect(smem, 16);
            }),
      fault("CopyThatNobodyWaitsFor", "exit", "",
            [](Address smem, Words words) {
              if (thread() == 0) cp_async_zfill(smem, words, true, policy_evict_last());
            }),
      fault("BulkCopyWithoutCommit", "exit", "was never committed",
            [](Address smem, Words words) {
              if (thread() != 0) return;
              for (Address at = 0; at < 16; at += 4) st_shared(smem + at, 0u);
              fence_proxy_async_shared();
              bulk_store(words, smem, 16, policy_evict_first());
            }),
      fault("BlockEndsWhileTheOtherReachesIntoIt", "exit", "may still reach into it",
            [](Address smem, Words) {
              init(smem, 1);
              cluster_sync();
              if (thread() != 0) return;
              if (cluster_rank() == 0) wait_a_while(smem);
              if (cluster_rank() == 7) st_shared_cluster(map_shared(smem + 8, 0), {1.0f, 0.0f});
            },
            {.blocks = 8}),
      fault("ArrivalAtABlockThatHasEnded", "cluster", "reaches into a block that has ended",
            [](Address smem, Words) {
              init(smem, 1);
              cluster_sync();
              if (cluster_rank() != 0 || thread() != 0) return;
              wait_a_while(smem);
              mbarrier_arrive_cluster(map_shared(smem, 1));
            },
            {.blocks = 2}),
      fault("TwoArrivalsAtTheClusterBarrier", "cluster", "arrives twice",
            [](Address, Words) { cluster_arrive(), cluster_arrive(); }, {.blocks = 2}),
      fault("ClusterWaitWithoutArrival", "cluster", "without an arrival",
            [](Address, Words) { cluster_wait(); }, {.blocks = 2}),
      fault("RankOutsideOfTheCluster", "cluster", "to rank 8 of 8",
            [](Address smem, Words) { map_shared(smem, 8); }, {.blocks = 8}),
  };
}

// Where the bits of the rank begin in an address, and that which tells the odd block of a pair.
constexpr int kRankBits = 24;
constexpr Address kOdd = 1u << kRankBits;

// Thread 0 of each block of a pair arrives at a barrier, for which the even one waits.
void arrive_in_pair(Address smem, Address told) {
  init(smem, 2);
  cluster_sync();
  if (thread() == 0) mbarrier_arrive_cluster(told);
  if (cluster_rank() == 0) mbarrier_wait_cluster(smem, 0, "pair", 0);
  cluster_sync();
}

std::vector<Fault> address_faults() {
  return {
      fault("AccessBeforeTheOtherBlockRuns", "cluster", "of which nothing tells that it has begun",
            [](Address smem, Words) {
              if (thread() == 0) ld_shared_cluster(map_shared(smem, 1 - cluster_rank()));
              cluster_sync();
            },
            {.blocks = 2}),
      fault("BarrierOfTheEvenBlockWithoutAMask", "deadlock", "wait as \"pair\"",
            [](Address smem, Words) { arrive_in_pair(smem, smem); }, {.blocks = 2}),
      fault("MaskOfAnotherBit", "cluster", "are not those of a block of the cluster",
            [](Address smem, Words) { arrive_in_pair(smem, smem | kOdd << 1); }, {.blocks = 2}),
      fault("AddressWithoutItsRank", "cluster", "are not those of the block",
            [](Address smem, Words) { ld_shared<std::uint32_t>(smem & (kOdd - 1)); },
            {.blocks = 2}),
      fault("AddressOfAnotherBlockInAnOwnStore", "cluster", "are not those of the block",
            [](Address smem, Words) { st_shared(map_shared(smem, 1 - cluster_rank()), 1u); },
            {.blocks = 2}),
  };
}

constexpr Address kImageOfB = 8192;

// A product of 64 rows of A with 32 of B behind them, of which each warp knows as much as its own
// wait tells.
void multiply(Address smem) {
  for (Address at = 16 * thread(); at < kSharedBytes; at += 16 * 128) {
    st_shared(smem + at, uint4{0, 0, 0, 0});
  }
  fence_proxy_async_shared();
  __syncthreads();
  float sums[16] = {};
  wgmma_fence();
  wgmma_m64n32k16<Major::K, Major::K>(sums, descriptor_k_major(smem),
                                      descriptor_k_major(smem + kImageOfB), true);
  wgmma_commit();
  wgmma_wait<0>();
}
// The first word of row `row` of an image.
void store_row(Address image, Address row) { st_shared(image + 128 * row, thread()); }

std::vector<Fault> product_faults() {
  return {
      fault("RowsOfBStoredBehindTheWaitOfOneWarp", "race", "read by a matrix product for warp ",
            [](Address smem, Words) {
              multiply(smem);
              if (thread() % 32 == 0) store_row(smem + kImageOfB, thread() / 32);
            },
            {.threads = 128}),
      fault("RowsOfAnotherWarpsAStoredBehindTheOwnWait", "race",
            "is not ordered behind a read by a matrix product for warp ",
            [](Address smem, Words) {
              multiply(smem);
              if (thread() % 32 == 0) store_row(smem, (thread() / 32 ^ 1) * 16);
            },
            {.threads = 128}),
  };
}

// Each lane's 16 of 512 bytes.
void load_squares(Address smem) {
  std::uint32_t r[4];
  ldmatrix_x4(smem + 16 * (thread() % 32), r[0], r[1], r[2], r[3]);
}

std::vector<Fault> warp_product_faults() {
  return {
      fault("FragmentsOfACopyUnderWay", "race", "for which nobody has waited",
            [](Address smem, Words words) {
              cp_async(smem + 16 * thread(), words);
              cp_async_commit();
              __syncwarp();
              load_squares(smem);
            }),
      fault("FragmentsOfWhatAnotherThreadCopied", "race", "ldmatrix",
            [](Address smem, Words words) {
              cp_async(smem + 16 * thread(), words);
              cp_async_commit();
              cp_async_wait<0>();
              load_squares(smem);
            }),
      fault("CopyOverFragmentsOfAnotherWarp", "race", "cp.async",
            [](Address smem, Words words) {
              if (thread() < 32) {
                for (int i = 0; i < 4; ++i) st_shared(smem + 16 * thread() + 4 * i, 0u);
              }
              __syncthreads();
              if (thread() >= 32) return load_squares(smem);
              cp_async(smem + 16 * thread(), words);
              cp_async_commit();
              cp_async_wait<0>();
            },
            {.threads = 64}),
      fault("FragmentsAtAnOddAddress", "ldmatrix", "is not a multiple of 16",
            [](Address smem, Words) { load_squares(smem + 8); }),
      fault("ProductsOfOtherTypes", "warp", "while other lanes are at",
            [](Address, Words) {
              float d[4] = {};
              const std::uint32_t a[4] = {};
              if (thread() == 5) {
                mma_m16n8k16<DType::f16>(d, a, 0, 0);
              } else {
                mma_m16n8k16<DType::bf16>(d, a, 0, 0);
              }
            }),
      fault("TransposedByAllLanesButOne", "warp", "while other lanes are at",
            [](Address, Words) {
              if (thread() == 5) {
                __syncwarp();
              } else {
                movmatrix_trans(0);
              }
            }),
  };
}

// Block 0 stores a word and says so by a flag; block 1 looks for a while, and loads the word.
constexpr Shape kTwoBlocks{.blocks = 2, .cluster = 1};
constexpr int kData = 0, kFlag = 4, kOther = 8;
std::uint64_t* flag_of(Words words) { return reinterpret_cast<std::uint64_t*>(words + kFlag); }

template <class Store, class Tell, class IsTold>
void hand_over(Words words, const Store& store, const Tell& tell, const IsTold& is_told) {
  if (thread() != 0) return;
  if (blockIdx.x == 0) {
    store();
    tell();
  } else {
    for (int i = 0; i < 500 && !is_told(); ++i) continue;
    words[kOther] = words[kData];
  }
}
template <class Tell, class IsTold>
void hand_over(Words words, const Tell& tell, const IsTold& is_told) {
  hand_over(words, [&] { words[kData] = 1; }, tell, is_told);
}

std::vector<Fault> handover_faults() {
  const char* const unordered = "is not ordered behind a write by thread 0 (warp 0) of block [0,";
  return {
      fault(
          "FlagThatIsStoredRelaxed", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { st_relaxed_sys(flag_of(words), 1); },
                [&] { return ld_acquire_sys(flag_of(words)) == 1; });
          },
          kTwoBlocks),
      fault(
          "FlagThatIsReadRelaxed", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { st_release_gpu(words + kFlag, 1); },
                [&] { return ld_relaxed_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault(
          "FenceOfABlockBeforeAFlag", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { __threadfence_block(), st_relaxed_sys(flag_of(words), 1); },
                [&] { return ld_acquire_sys(flag_of(words)) == 1; });
          },
          kTwoBlocks),
      fault(
          "FenceBehindTheFlag", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { reduce_add<1>(words + kFlag), __threadfence(); },
                [&] { return ld_acquire_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault(
          "SumOfAnotherBehindItsOwn", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { reduce_add<1>(words + kData); }, [&] { reduce_add<1>(words + kFlag); },
                [&] {
                  if (ld_acquire_gpu(words + kFlag) == 0) return false;
                  reduce_add<1>(words + kData);
                  return true;
                });
          },
          kTwoBlocks),
      fault(
          "CountWithoutAFenceBehindIt", "race", "is not ordered behind a",
          [](Address, Words words) {
            hand_over(
                words, [&] { __threadfence(), reduce_add<1>(words + kFlag); },
                [&] { return atomicAdd(words + kFlag, 0u) == 1; });
          },
          kTwoBlocks),
      fault(
          "VolatileFlagWithoutAFence", "race", unordered,
          [](Address, Words words) {
            hand_over(
                words, [&] { *static_cast<volatile std::uint32_t*>(words + kFlag) = 1; },
                [&] { return ld_acquire_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault(
          "PlainFlagBehindAFence", "race", "is not ordered behind a",
          [](Address, Words words) {
            hand_over(
                words, [&] { __threadfence(), words[kFlag] = 1; },
                [&] { return ld_acquire_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault(
          "FlagOfAnotherThreadWithoutABarrier", "race", "is not ordered behind a",
          [](Address, Words words) {
            if (blockIdx.x == 0 && thread() == 1) words[kData] = 1;
            hand_over(
                words, [] {}, [&] { st_release_gpu(words + kFlag, 1); },
                [&] { return ld_acquire_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault(
          "FlagBeforeABulkCopyHasEnded", "race", "which has not waited for it",
          [](Address smem, Words words) {
            hand_over(
                words,
                [&] {
                  for (Address at = 0; at < 16; at += 4) st_shared(smem + at, 1u);
                  fence_proxy_async_shared();
                  bulk_store(words, smem, 16, policy_evict_first());
                  bulk_commit();
                  bulk_wait_read<0>();
                },
                [&] { st_release_gpu(words + kFlag, 1); },
                [&] { return ld_acquire_gpu(words + kFlag) == 1; });
          },
          kTwoBlocks),
      fault("BulkCopyOfWhatWasStoredWithoutAProxyFence", "proxy fence",
            "of global memory, byte 0 of an allocation",
            [](Address smem, Words words) {
              init(smem + 16, 1);
              if (thread() != 0) return;
              words[kData] = 1;
              mbarrier_arrive_expect(smem + 16, 16);
              bulk_load(smem, words, 16, smem + 16, policy_evict_first());
              mbarrier_wait(smem + 16, 0, "consume", 0);
            }),
      fault("BulkCopyBehindTheProxyFenceOfSharedMemory", "proxy fence",
            "of global memory, byte 0 of an allocation",
            [](Address smem, Words words) {
              init(smem + 16, 1);
              if (thread() != 0) return;
              words[kData] = 1;
              fence_proxy_async_shared();
              mbarrier_arrive_expect(smem + 16, 16);
              bulk_load(smem, words, 16, smem + 16, policy_evict_first());
              mbarrier_wait(smem + 16, 0, "consume", 0);
            }),
      fault(
          "SumOfPlainLoadsAndStores", "race", "is not ordered behind a",
          [](Address, Words words) {
            if (thread() == 0) words[kData] += 1 + blockIdx.x;
          },
          kTwoBlocks),
      fault(
          "SumBesideAPlainStore", "race", "is not ordered behind a",
          [](Address, Words words) {
            if (thread() != 0) return;
            if (blockIdx.x == 0) atomicAdd(words, 1u);
            if (blockIdx.x == 1) words[kData] = 5;
          },
          kTwoBlocks),
      fault(
          "StoreBesideALoad", "race", "is not ordered behind a",
          [](Address, Words words) {
            if (thread() == 0) words[4 * blockIdx.x] = words[kData] + 1;
          },
          kTwoBlocks),
  };
}

// Each lane stores its word, from those 8 words further on.
__global__ void kernel_before(Words words) {
  allow_next_kernel();
  if (thread() < 8) words[thread()] = words[thread() + 8] + thread() + 1;
}
// Behind that kernel, without a wait of the host.
template <class Body>
Fault early_fault(const char* name, const char* says, Body) {
  return {name, "race", says, [](Words words) {
            kRuntime.launch(kernel_before, 1, 32, 0, nullptr, words);
            launch_body<Body>({.early = true}, words);
          }};
}

std::vector<Fault> early_faults() {
  return {
      early_fault("EarlyKernelThatLoadsBeforeItsWait", "is not ordered behind a write by thread 1",
                  [](Address, Words words) {
                    if (thread() == 0) words[15] = words[1];
                    wait_for_kernel_before();
                  }),
      early_fault("EarlyKernelThatStoresBeforeItsWait", "is not ordered behind a read by thread 1",
                  [](Address, Words words) {
                    if (thread() == 0) words[9] = 5;
                    wait_for_kernel_before();
                  }),
      early_fault("EarlyKernelOfWhichOneThreadWaits", "is not ordered behind a write by thread 1",
                  [](Address, Words words) {
                    if (thread() == 0) wait_for_kernel_before();
                    if (thread() == 1) words[15] = words[1];
                  }),
  };
}

// 32 columns of one block's tensor memory; all threads know of them.
std::uint32_t allocate(Address smem) {
  if (thread() < 32) tcgen05_alloc<1>(smem, 32), tcgen05_fence_before();
  __syncthreads();
  tcgen05_fence_after();
  return ld_shared<std::uint32_t>(smem);
}

std::vector<Fault> tensor_faults() {
  return {
      fault("AllocationOf48Columns", "tcgen05", "tcgen05.alloc of 48 columns",
            [](Address smem, Words) { tcgen05_alloc<1>(smem, 48); }),
      fault("AllocationThatIsNotReturned", "exit", "without tcgen05.dealloc",
            [](Address smem, Words) { allocate(smem); }),
      fault("ReturnOfAnotherSize", "tcgen05", "which is no allocation",
            [](Address smem, Words) { tcgen05_dealloc<1>(allocate(smem), 64); }),
      fault("LanesOfAnotherWarp", "tcgen05", "while the warp may reach those from 0",
            [](Address smem, Words) {
              std::uint32_t r[16];
              const std::uint32_t at = allocate(smem);
              if (thread() < 32) tcgen05_ld_32x32b(at + (32 << 16), r);
            },
            {.threads = 64}),
      fault("ColumnsThatAreNotAllocated", "tcgen05", "which are not in one allocation",
            [](Address smem, Words) {
              std::uint32_t r[16];
              tcgen05_ld_32x32b(allocate(smem) + 24, r);
            }),
      fault("LoadWithoutWait", "exit", "without tcgen05.wait::ld",
            [](Address smem, Words) {
              std::uint32_t r[16];
              tcgen05_ld_32x32b(allocate(smem), r);
            }),
      fault("PairInAClusterOfOneBlock", "tcgen05", "in a cluster of one block",
            [](Address smem, Words) { tcgen05_alloc<2>(smem, 32); }),
      fault("ProductOfTheOddBlock", "tcgen05", "of a pair in its odd block",
            [](Address smem, Words) {
              tcgen05_alloc<2>(smem, 32);
              if (cluster_rank() == 1 && thread() == 0) tcgen05_mma<2>(0, 0, 0, 0, false);
              cluster_sync();
            },
            {.blocks = 2}),
      fault("DescriptorWithoutAMask", "matrix descriptor", "bit 15 is set",
            [](Address smem, Words) {
              const std::uint32_t at = allocate(smem);
              const std::uint64_t masked = smem >> 4 & ~0x3fffu;
              const std::uint64_t image = tcgen05_mn_major(smem + 1024, 4096);
              if (thread() == 0) {
                tcgen05_mma<1>(at, image | masked, image,
                               tcgen05_bf16(128, 32, Major::MN, Major::MN), false);
              }
            },
            {.blocks = 2}),
      fault("InstructionDescriptorOfZeros", "instruction descriptor", "",
            [](Address smem, Words) {
              const std::uint32_t at = allocate(smem);
              if (thread() == 0) tcgen05_mma<1>(at, 0, 0, 0, false);
            }),
  };
}

}  // namespace

std::vector<Fault> faults() {
  std::vector<Fault> list = memory_faults();
  for (const auto& more : {barrier_faults(), warp_product_faults(), exit_faults(), address_faults(),
                           product_faults(), tensor_faults(), handover_faults(), early_faults()}) {
    list.insert(list.end(), more.begin(), more.end());
  }
  return list;
}

namespace {

__global__ void meeting_kernel(Words words) {
  if (thread() != 0) return;
  reduce_add<1>(words);
  while (ld_acquire_gpu(words) < gridDim.x) {
  }
}
__global__ void exchange_kernel(std::uint64_t* words, int mine, int other, std::uint64_t value) {
  if (thread() != 0) return;
  st_release_sys(words + mine, value);
  while (ld_acquire_sys(words + other) != value) {
  }
}

__global__ void release_of_gpu_kernel(Words words, bool tells) {
  if (thread() != 0) return;
  if (tells) {
    words[kData] = 1;
    st_release_gpu(words + kFlag, 1);
  } else {
    for (int i = 0; i < 500 && ld_acquire_gpu(words + kFlag) == 0; ++i) continue;
    words[kOther] = words[kData];
  }
}

}  // namespace

void queue_meeting(Words words, unsigned blocks) {
  kRuntime.launch(meeting_kernel, blocks, 32, 0, nullptr, words);
}
void queue_exchange(void* stream, std::uint64_t* words, int mine, int other, std::uint64_t value) {
  kRuntime.launch(exchange_kernel, 1, 32, 0, static_cast<cudaStream_t>(stream), words, mine, other,
                  value);
}

void queue_release_of_gpu(void* stream, Words words, bool tells) {
  kRuntime.launch(release_of_gpu_kernel, 1, 32, 0, static_cast<cudaStream_t>(stream), words, tells);
}

void launch_faultless(Words words) {
  launch_body<decltype([](Address smem, Words to) {
    arrive_in_pair(smem, smem & ~kOdd);
    if (thread() == 0) to[cluster_rank()] = cluster_rank();
  })>({.blocks = 2}, words);
  launch_body<decltype([](Address smem, Words) {
    multiply(smem);
    if (thread() % 32 == 0) store_row(smem, thread() / 32 * 16);  // rows that the warp has read
    __syncthreads();
    if (thread() < 32) store_row(smem + kImageOfB, thread());
  })>({.threads = 128}, words);
}

bool launches_in_cluster(unsigned blocks, bool allowed) {
  auto* const kernel = faulty_kernel<decltype([](Address, Words) {})>;
  kRuntime.check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, allowed ? 1 : 0),
      "cudaFuncSetAttribute");
  return launch_clusters(kernel, blocks, dim3(blocks), dim3(1024), 0, nullptr, nullptr) ==
         cudaSuccess;
}

}  // namespace winnow::engine_faults
