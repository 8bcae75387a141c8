// What the attention kernels of sm90 share (forward, decode): two consumer warpgroups that multiply
// tiles of 64 chosen rows while a third, which is the kernel's own, brings the rows.
//
// A persistent block of three warpgroups takes items in turn: 64 heads of a query, and its tiles or
// some of them. Its 64 x 512 f32 output fills half of the register file, so two consumer warpgroups
// hold it: consumer 0 the columns 0 to 255, consumer 1 the rest. The tiles of an item (64 chosen
// rows each) alternate between the consumers: tile t belongs to consumer t % 2, which computes its
// logits and probabilities P. Both consumers then add P V of every tile, in order, to their half of
// the output: the owner with P from registers, the other with P from shared memory. The steps of
// the consumer that owns tile t:
//
//   1. queue the logits Q K(t), group by group as the chunks come
//   2. when P(t-1) is handed over, queue P(t-1) V(t-1) behind them
//   3. with the logits there and while P V runs: mask, maxima, reference
//   4. as P V is done: release this consumer's half of V(t-1), in two parts
//   5. exponentials: P(t)
//   6. queue P(t) V(t), hand P(t) over meanwhile; when it is done release this consumer's half of
//   V(t)
//
// So the exponentials of one consumer run while the other multiplies:
//
//   gather       K(0) Q  K(1)                 K(2)               K(3)               K(4)
//   consumer 0     QK 0 | max | exp | PV 0 |     QK 2 |  PV 1 + max | exp | PV 2 |     QK 4 | ...
//   consumer 1             QK 1 |     PV 0 + max | exp | PV 1 |     QK 3 |  PV 2 + max | exp | ...
//
// Shared memory holds two tiles, so how long a tile stays decides the speed: it is copied and
// released in groups of one to three chunks of 64 columns, and multiplied as they come.
//
// Q and K are copied by cp.async, and between the copies and wgmma stands nothing but the mbarrier
// on which the copies arrive, as in CUTLASS's cp.async mainloops for sm90
// (sm90_mma_multistage_gmma_ss_warpspecialized.hpp). The letter of PTX asks for a proxy fence as
// well; without one after each wait the kernel was measured 5 to 20 % faster on an H200. P, which
// stmatrix writes, does have its fence (hand_over()).
//
// The softmax is online, in base 2. The reference m of a row is the maximum at some earlier time,
// raised only when a logit exceeds it by kLazy: P stays below 2^kLazy and the output is rescaled
// about once an item instead of twice a tile. m(t) travels from owner to other consumer with P(t),
// so both agree on the reference at every tile. The true maximum is kept beside it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::attention_sm90 {

using namespace winnow::device;

// Logits in base 2 are sign * factor * (q . k), with factor > 0 and sign 1, -1 or 0: the kernels
// multiply -inf by the factor, and take maxima before it.
struct LogitScale {
  float factor, sign;
};
inline LogitScale logit_scale(double scale) {
  const float scale2 = static_cast<float>(scale) * kLog2e;
  return {scale2 == 0 ? 1.0f : std::fabs(scale2), scale2 == 0 ? 0.0f : std::copysign(1.0f, scale2)};
}

inline constexpr int kThreads = 384;  // consumer 0, consumer 1, and the warpgroup that brings rows
inline constexpr int kHeads = 64;     // of an item
inline constexpr int kWarpsPerConsumer = 4;
inline constexpr int kValueColumns = 512;
inline constexpr int kGroups = 4;           // of chunks of V, in which they are copied and released
inline constexpr int kRopeGroup = kGroups;  // that of K's last chunk, where P lies elsewhere
// Of the 168 registers that each of 384 threads begins with, two consumers of 216 leave 72 for the
// third warpgroup.
inline constexpr int kConsumerRegisters = 216;

// A logit may exceed the reference by this much (in base 2) before the output is rescaled. Sums and
// products stay far from overflow, and bf16 has the same relative precision everywhere.
inline constexpr float kLazy = 8.0f;
// The reference of a row that has seen nothing: finite, so that differences are never NaN.
inline constexpr float kNoReference = -1e30f;

// Shared memory.
//
// P lies in chunk 8 of its tile's slot, which holds the columns 512 to 575 of K until the logits
// are there (with 512 columns it is for P alone). So that chunk is free when the other consumer is
// through. Or kApart: P has a place of its own, and the chunk is free with the logits. One place
// serves both consumers: one writes its P only after it has read the other's.
template <int kDim, bool kApart>
struct Layout {
  static constexpr int kChunks = kDim / kChunkColumns;  // of a row: 9 or 8; V is the first 8
  static constexpr int kAllGroups = kApart ? kGroups + 1 : kGroups;
  struct Slot {
    Chunk chunks[9];
  };

  Chunk q[kChunks + (kApart ? 1 : 0)];  // and behind Q the place of P
  Slot k[2];
  float reference[2][kHeads];  // [slots]: m(t)
  float sum[2][2][kHeads];     // [items][consumers]
  float top[2][2][kHeads];     // [items][consumers]
  std::uint64_t mask[2];       // [slots]: valid entries

  // Who arrives -> who waits.
  Mbarrier full[2][kAllGroups];   // [slots]: gather -> owner
  Mbarrier empty[2][kAllGroups];  // [slots]: a consumer -> gather
  Mbarrier q_full[kAllGroups];    // gather -> both consumers
  Mbarrier q_free;                // both consumers -> gather
  Mbarrier p_ready[2];            // [slots]: owner -> other consumer
  Mbarrier sum_ready;             // both consumers -> both consumers
};

// Where things are in it, in bytes.
template <int kColumns, bool kPlaceApart = false>
struct Plan {
  static constexpr int kDim = kColumns;
  static constexpr bool kApart = kPlaceApart;
  static_assert(kDim == 576 || (kDim == 512 && !kApart));
  using Memory = Layout<kDim, kApart>;
  static constexpr int kAllGroups = Memory::kAllGroups;
  static constexpr int kFirstGroup = kApart ? kRopeGroup : 0;
  static constexpr int kSlotBytes = sizeof(typename Memory::Slot);

  static constexpr int kQ = offsetof(Memory, q);
  static constexpr int kK = offsetof(Memory, k);
  static constexpr int kReference = offsetof(Memory, reference);
  static constexpr int kSum = offsetof(Memory, sum);
  static constexpr int kTop = offsetof(Memory, top);
  static constexpr int kMask = offsetof(Memory, mask);
  static constexpr int kFull = offsetof(Memory, full);
  static constexpr int kEmpty = offsetof(Memory, empty);
  static constexpr int kQFull = offsetof(Memory, q_full);
  static constexpr int kQFree = offsetof(Memory, q_free);
  static constexpr int kPReady = offsetof(Memory, p_ready);
  static constexpr int kSumReady = offsetof(Memory, sum_ready);
  static constexpr int kBytes = sizeof(Memory);
  // Of P of the tile in a slot.
  __host__ __device__ static constexpr int probabilities(int slot) {
    return kApart ? kK - kChunkBytes : kK + slot * kSlotBytes + 8 * kChunkBytes;
  }
  // The groups of a tile in the order of their copies and products.
  __host__ __device__ static constexpr int group_in_order(int n) {
    return kApart ? (n + kGroups) % kAllGroups : n;
  }

  static_assert(kK % 1024 == 0 && kSlotBytes % 1024 == 0);
  static_assert(kBytes <= 232448, "227 KB is what a block can have");
};
static_assert(Plan<576>::kReference == 221184 && Plan<576>::kFull == 223760);
static_assert(Plan<576>::kSumReady == 223944 && Plan<576>::kBytes == 223952);
static_assert(Plan<576, true>::kReference == 229376 && Plan<576, true>::kFull == 231952);
static_assert(Plan<576, true>::kSumReady == 232176 && Plan<576, true>::kBytes == 232184);
static_assert(Plan<512>::kReference == 212992 && Plan<512>::kFull == 215568);
static_assert(Plan<512>::kSumReady == 215752 && Plan<512>::kBytes == 215760);

// The chunks of group g of a tile in slot s: the owner's half of V first, because the owner is done
// with it first. Groups 0 and 1 are released by the owner, 2 and 3 by the other consumer, with the
// chunk that P takes; kRopeGroup by the owner.
__host__ __device__ constexpr int group_chunk(int slot, int group, int i) {
  if (i == 2 || group == kRopeGroup) return 8;
  return 4 * (group < 2 ? slot : 1 - slot) + 2 * (group % 2) + i;
}
template <class P>
__host__ __device__ constexpr int group_size(int group) {
  if (group == kRopeGroup) return 1;
  return P::kDim == 576 && !P::kApart && group == 3 ? 3 : 2;
}

// --- for the warpgroup that brings the rows -----------------------------------------------------

// Copies 64 heads (head_rows()) to sQ.
template <class P>
__device__ __forceinline__ void load_queries(std::uint32_t smem, const GatherRows& heads,
                                             int thread, std::uint64_t policy) {
#pragma unroll
  for (int n = 0; n < P::kAllGroups; ++n) {
    const int group = P::group_in_order(n);
#pragma unroll
    for (int i = 0; i < group_size<P>(group); ++i) {
      const int chunk = group_chunk(0, group, i);
      gather_chunk(smem + P::kQ + chunk * kChunkBytes, heads, chunk, thread, policy);
    }
    mbarrier_arrive_cp_async(smem + P::kQFull + 8 * group);
  }
}

// The arrivals of a group of load_groups(): one a thread, one more for the mask with group 0.
__device__ constexpr int copied_group_arrivals(int group) {
  return kGatherThreads + (group == 0 ? 1 : 0);
}

// Copies one tile into a slot, as its groups are released: copy(group) starts the copies of a
// group, which arrive on `landed`'s barrier of it. The mask comes with group 0.
template <class P, int kSlot, class Copy>
__device__ __forceinline__ void load_groups(std::uint32_t smem, std::uint32_t parity,
                                            std::uint32_t landed, std::uint64_t mask, int thread,
                                            const Copy& copy) {
#pragma unroll
  for (int n = 0; n < P::kAllGroups; ++n) {
    const int group = P::group_in_order(n);
    mbarrier_wait(smem + P::kEmpty + 8 * (kSlot * P::kAllGroups + group), parity ^ 1, "gather",
                  10 * kSlot + group);
    copy(group);
    if (group == 0 && thread == 0) {
      // The owner's warps read the last mask before they released the group just waited for. This
      // arrival, one more than there are threads, publishes the store.
      st_shared(smem + P::kMask + 8 * kSlot, mask);
      mbarrier_arrive(landed);
    }
    mbarrier_arrive_cp_async(landed + 8 * group);
  }
}

// The same of rows in bf16, which the owner takes as they land.
template <class P, int kSlot>
__device__ __forceinline__ void load_tile_rows(std::uint32_t smem, std::uint32_t parity,
                                               const GatherRows& rows, std::uint64_t mask,
                                               int thread, std::uint64_t policy) {
  const auto copy = [&](int group) {
#pragma unroll
    for (int i = 0; i < group_size<P>(group); ++i) {
      const int chunk = group_chunk(kSlot, group, i);
      gather_chunk(smem + P::kK + kSlot * P::kSlotBytes + chunk * kChunkBytes, rows, chunk, thread,
                   policy);
    }
  };
  load_groups<P, kSlot>(smem, parity, smem + P::kFull + 8 * kSlot * P::kAllGroups, mask, thread,
                        copy);
}

// --- the two consumers --------------------------------------------------------------------------

// Consumer kEither: which of the two it is shows when the kernel runs, and both share their
// instructions. That costs a few in each tile; a call that is over after some tiles waits less for
// instructions that are read for the first time.
inline constexpr int kEither = -1;
template <int kConsumer>
__device__ __forceinline__ int number_of() {
  if constexpr (kConsumer != kEither) return kConsumer;
  return __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
}

// What a thread knows of its two rows (heads): lane / 4 of the warp's 16, and 8 further.
struct RowState {
  float reference[2];  // m, in base 2
  float sum[2];        // of P over the tiles and columns of this thread, relative to m
  float top[2];        // largest logit of this consumer's tiles, in base 2; see softmax_reference()
};

// Half of the output: o[piece] are the 128 columns 128 * piece of the consumer's 256.
using Output = float[2][64];

// Takes over new references of the thread's rows. `factors` are what sums of before shrink by.
__device__ __forceinline__ void raise_reference(RowState& state, const float (&raised)[2],
                                                float (&factors)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    factors[r] = ex2(state.reference[r] - raised[r]);  // exactly 1 where nothing was raised
    state.reference[r] = raised[r];
    state.sum[r] *= factors[r];
  }
}

// Brings the output to the new references. They are raised in few tiles.
__device__ __forceinline__ void rescale(Output& o, const float (&factors)[2]) {
  if (!__any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        o[piece][4 * j + 2 * r] *= factors[r];
        o[piece][4 * j + 2 * r + 1] *= factors[r];
      }
    }
  }
}

// Queues the logits of one group of chunks: s (+)= Q K^T. One commit group.
template <class P, int kGroup>
__device__ __forceinline__ void multiply_scores(std::uint32_t smem, int slot, float (&s)[32]) {
  const std::uint64_t base = descriptor_k_major(smem);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < group_size<P>(kGroup); ++i) {
    const int chunk = group_chunk(slot, kGroup, i);
    const std::uint32_t q = P::kQ + chunk * kChunkBytes;
    const std::uint32_t k = P::kK + slot * P::kSlotBytes + chunk * kChunkBytes;
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n64k16<Major::K, Major::K>(s, descriptor_offset(base, q + 32 * k16),
                                          descriptor_offset(base, k + 32 * k16),
                                          kGroup != P::kFirstGroup || i > 0 || k16 > 0);
    }
  }
  wgmma_commit();
}

// The largest of a thread's logits in its row r.
__device__ __forceinline__ float thread_maximum(const float (&s)[32], int r) {
  float largest = s[2 * r];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
  }
  return largest;
}

// Hides the logits of an owned tile that are not valid.
__device__ __forceinline__ void hide_logits(const LogitScale& scale, std::uint64_t mask, int lane,
                                            float (&s)[32]) {
  if (scale.sign != 1.0f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= scale.sign;
  }
  if (~mask != 0) {  // bit 8 j + e of `mine`: column 8 j + 2 (lane % 4) + e
    const std::uint64_t mine = mask >> (2 * (lane & 3));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(mine >> (8 * j + e) & 1)) {
          s[4 * j + e] = negative_infinity();
          s[4 * j + 2 + e] = negative_infinity();
        }
      }
    }
  }
}

// Takes the maxima of an owned tile into the state and raises the references where they are
// exceeded. `top` is that of the row.
__device__ __forceinline__ void softmax_reference(const LogitScale& scale, const float (&s)[32],
                                                  RowState& state, float (&factors)[2]) {
  float raised[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = quad_max(thread_maximum(s, r)) * scale.factor;
    state.top[r] = fmaxf(state.top[r], top);
    raised[r] = top > state.reference[r] + kLazy ? top : state.reference[r];
  }
  raise_reference(state, raised, factors);
}

// The same without shuffles in most tiles. They take the way to shared memory, which the copies and
// the operands of the other consumer's products keep busy, and took a quarter of a tile's time. The
// maxima of threads tell whether a reference is exceeded, and those of rows are formed where one
// is. `top` is that of the thread's logits. Returns whether a reference of the warp was raised.
__device__ __forceinline__ bool softmax_reference_of_threads(const LogitScale& scale,
                                                             const float (&s)[32], RowState& state,
                                                             float (&factors)[2]) {
  float top[2];
  bool exceeded = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = thread_maximum(s, r) * scale.factor;
    state.top[r] = fmaxf(state.top[r], top[r]);
    exceeded |= top[r] > state.reference[r] + kLazy;
  }
  factors[0] = factors[1] = 1.0f;
  if (!__any_sync(kFullWarp, exceeded)) return false;
  float raised[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float row = quad_max(top[r]);
    raised[r] = row > state.reference[r] + kLazy ? row : state.reference[r];
  }
  raise_reference(state, raised, factors);
  return true;
}

// Probabilities of an owned tile, packed as A fragments, and their sums.
__device__ __forceinline__ void softmax_weights(const LogitScale& scale, const float (&s)[32],
                                                std::uint32_t (&p)[16], RowState& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = ex2(fmaf(s[4 * j + 2 * r], scale.factor, -state.reference[r]));
      const float b = ex2(fmaf(s[4 * j + 2 * r + 1], scale.factor, -state.reference[r]));
      sum += a + b;
      p[2 * j + r] = pack_bf16(a, b);
    }
    state.sum[r] += sum;
  }
}

// Stores P of an owned tile for the other consumer.
template <class P>
__device__ __forceinline__ void store_probabilities(std::uint32_t smem, int consumer, int warp,
                                                    int lane, const std::uint32_t (&p)[16]) {
  const std::uint32_t chunk = smem + P::probabilities(consumer);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    stmatrix_x4(fragment_address(chunk, warp, lane, k16), p[4 * k16], p[4 * k16 + 1],
                p[4 * k16 + 2], p[4 * k16 + 3]);
  }
}

// The references of a tile on their way from its owner to the other consumer. kFast: those of a
// thread's two rows lie side by side, for one access.
template <class P, bool kFast>
__device__ __forceinline__ std::uint32_t reference_address(std::uint32_t smem, int owner, int warp,
                                                           int lane) {
  return smem + P::kReference + 4 * (owner * kHeads + 16 * warp + lane / 4 * (kFast ? 2 : 1));
}
template <class P, bool kFast>
__device__ __forceinline__ void store_references(std::uint32_t smem, int owner, int warp, int lane,
                                                 const float (&references)[2]) {
  const std::uint32_t at = reference_address<P, kFast>(smem, owner, warp, lane);
  if constexpr (kFast) {
    st_shared(at,
              std::uint64_t{__float_as_uint(references[1])} << 32 | __float_as_uint(references[0]));
  } else {
    st_shared(at, references[0]);
    st_shared(at + 32, references[1]);
  }
}
template <class P, bool kFast>
__device__ __forceinline__ void load_references(std::uint32_t smem, int owner, int warp, int lane,
                                                float (&references)[2]) {
  const std::uint32_t at = reference_address<P, kFast>(smem, owner, warp, lane);
  if constexpr (kFast) {
    const auto both = ld_shared<std::uint64_t>(at);
    references[0] = __uint_as_float(static_cast<std::uint32_t>(both));
    references[1] = __uint_as_float(static_cast<std::uint32_t>(both >> 32));
  } else {
    references[0] = ld_shared<float>(at);
    references[1] = ld_shared<float>(at + 32);
  }
}

// Gives what store_probabilities() has stored, and the reference, to the other consumer.
template <class P, bool kFast>
__device__ __forceinline__ void hand_over(std::uint32_t smem, int consumer, int warp, int lane,
                                          const RowState& state) {
  if ((lane & 3) == 0) store_references<P, kFast>(smem, consumer, warp, lane, state.reference);
  fence_proxy_async_shared();  // each writer, before the arrival that lets wgmma read
  mbarrier_arrive_warp(smem + P::kPReady + 8 * consumer);
}

// Queues o += P V for an owned tile, P from registers. Two commit groups, one a piece, and
// between() between them.
template <class P, class Between>
__device__ __forceinline__ void multiply_own_values(std::uint32_t smem, int consumer,
                                                    const std::uint32_t (&p)[16], Output& o,
                                                    const Between& between) {
  const std::uint64_t base = descriptor_mn_major(smem);
  wgmma_fence();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    if (piece == 1) between();
    const std::uint32_t v =
        P::kK + consumer * P::kSlotBytes + (4 * consumer + 2 * piece) * kChunkBytes;
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n128k16<Major::MN>(o[piece], p[4 * k16], p[4 * k16 + 1], p[4 * k16 + 2],
                                  p[4 * k16 + 3], descriptor_offset(base, v + 2048 * k16), true);
    }
    wgmma_commit();
  }
}

// Takes over the references of a tile of the other consumer. kFast: they are compared, which is
// sooner done than factors are formed, and few tiles raise one.
template <class P, bool kFast>
__device__ __forceinline__ void take_over_references(std::uint32_t smem, int owner, int warp,
                                                     int lane, RowState& state, Output& o) {
  float raised[2];
  load_references<P, kFast>(smem, owner, warp, lane, raised);
  if constexpr (kFast) {
    const bool same = raised[0] == state.reference[0] && raised[1] == state.reference[1];
    if (!__any_sync(kFullWarp, !same)) return;
  }
  float factors[2];
  raise_reference(state, raised, factors);
  rescale(o, factors);
}

// The same as multiply_own_values() for a tile of the other consumer, P from shared memory, after
// taking over its references.
template <class P, bool kFast>
__device__ __forceinline__ void multiply_other_values(std::uint32_t smem, int consumer,
                                                      std::uint32_t parity, int warp, int lane,
                                                      RowState& state, Output& o) {
  const int other = 1 - consumer;
  mbarrier_wait(smem + P::kPReady + 8 * other, parity, "consumer", consumer);
  take_over_references<P, kFast>(smem, other, warp, lane, state, o);

  const std::uint32_t slot = P::kK + other * P::kSlotBytes;
  const std::uint64_t p = descriptor_offset(descriptor_k_major(smem), P::probabilities(other));
  const std::uint64_t base = descriptor_mn_major(smem);
  wgmma_fence();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const std::uint32_t v = slot + (4 * consumer + 2 * piece) * kChunkBytes;
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n128k16<Major::K, Major::MN>(o[piece], descriptor_offset(p, 32 * k16),
                                            descriptor_offset(base, v + 2048 * k16), true);
    }
    wgmma_commit();
  }
}

// Gives a group of chunks of V back to the gather warpgroup.
template <class P, int kGroup>
__device__ __forceinline__ void release_group(std::uint32_t smem, int slot) {
  mbarrier_arrive_warp(smem + P::kEmpty + 8 * (slot * P::kAllGroups + kGroup));
}

// Waits for the two commit groups of the P V queued last and gives each piece's chunks back.
// kGroup: the first of the two groups of chunks: 0 of an owned tile, 2 of one of the other
// consumer. kBehind: commit groups queued since.
template <class P, int kGroup, int kBehind = 0>
__device__ __forceinline__ void release_values(std::uint32_t smem, int slot, Output& o) {
  wgmma_wait<1 + kBehind>();
  release_group<P, kGroup>(smem, slot);
  wgmma_wait<kBehind>();
  release_group<P, kGroup + 1>(smem, slot);
  wgmma_pin(o[0]);
  wgmma_pin(o[1]);
}

// Sums over both consumers and all columns, by way of shared memory. `item_parity` alternates, and
// the barrier of the next item separates the reads of this one from the writes two items later.
template <class P>
__device__ __forceinline__ void merge_consumers(std::uint32_t smem, int consumer,
                                                std::uint32_t item_parity, int warp, int lane,
                                                RowState& state) {
  const std::uint32_t row = 4 * (16 * warp + lane / 4);
  const std::uint32_t mine = 4 * kHeads * (2 * item_parity + consumer) + row;
  const std::uint32_t other = 4 * kHeads * (2 * item_parity + 1 - consumer) + row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.sum[r] = quad_sum(state.sum[r]);
    if ((lane & 3) == 0) {
      st_shared(smem + P::kSum + mine + 32 * r, state.sum[r]);
      st_shared(smem + P::kTop + mine + 32 * r, state.top[r]);
    }
  }
  mbarrier_arrive_warp(smem + P::kSumReady);
  mbarrier_wait(smem + P::kSumReady, item_parity, "consumer", consumer);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = ld_shared<float>(smem + P::kSum + other + 32 * r);
    const float top = ld_shared<float>(smem + P::kTop + other + 32 * r);
    state.sum[r] += sum;
    state.top[r] = fmaxf(state.top[r], top);
  }
}

// Writes the consumer's half of a row of the output, times `factor`, in the 16 bits that kPack
// makes of a value. `row` is the first of its 512 columns; rows of heads that do not exist are not
// written. The whole warp calls it, for the rows r = 0 and 1 of its threads in turn. kReadSoon: by
// the next kernel, so that L2 keeps it. kInPairs: the 32 columns of a quad stay as they are in it,
// each lane's pairs of columns 8 apart behind each other.
template <int kConsumer, auto kPack = pack_bf16, bool kReadSoon = false, bool kInPairs = false>
__device__ __forceinline__ void store_output_row(char* row, bool exists, int r, float factor,
                                                 int lane, const Output& o) {
  // A quad holds 32 columns of a row as 4 blocks of 8, two columns a lane; transposed, each lane
  // has one block, 16 bytes.
  char* const to = row + (number_of<kConsumer>() * 256 + 8 * (lane & 3)) * 2;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int at = 4 * (4 * part + b) + 2 * r;
        w[b] = kPack(o[piece][at] * factor, o[piece][at + 1] * factor);
      }
      if constexpr (!kInPairs) quad_transpose(w, lane);
      if constexpr (kReadSoon) {
        char* const at = to + (128 * piece + 32 * part) * 2;
        if (exists) *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
      } else {
        if (exists) store_streaming(to + (128 * piece + 32 * part) * 2, w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// What the output of a row is multiplied by, with a sink in base 2.
__device__ __forceinline__ float output_factor(float sum, float reference, float sink) {
  // Nothing visible: the sum is 0 and the output too, whatever the sink.
  return sum == 0.0f || sink == infinity() ? 0.0f : 1.0f / (sum + ex2(sink - reference));
}

// The role of a consumer. `work` says what the block's items are:
//   Work::kStoredRows        whether rows come by ordinary stores, not by copies
//   Work::kValuesBefore      before the logits of which group of a tile P V of the tile before is
//                            queued, and awaited behind them; kGroups: behind all logits, and
//                            awaited when the maxima are taken
//   work.first(), end(), step()
//   work.count(item)         what the number of the item's tiles hangs on; loaded an item ahead
//   work.tiles(item, count)  that number, the same in every role
//   Work::kParts             whether an item may be a part of one, of which another block has
//                            made, or makes, the rest; then also
//     work.ends(item, count)   whether the results of the item are stored here
//     work.take_over<kConsumer>(item, warp, lane, state, o), hand_on: what the part before left
//   work.store<kConsumer>(item, warp, lane, state, o)
template <class P, int kConsumer, class Work>
__device__ __forceinline__ void consumer_role(const Work& work, const LogitScale& scale,
                                              std::uint32_t smem) {
  const int consumer = number_of<kConsumer>(), other = 1 - consumer;
  const int thread = threadIdx.x & 127;
  const int warp = thread >> 5;
  const int lane = thread & 31;
  std::uint32_t own_uses = 0, other_uses = 0;  // of the slots: the parity of their barriers
  std::uint32_t q_uses = 0;                    // items with tiles
  // Where P V of the tile before is not left under way, all tiles share their instructions, which
  // leaves more room for others' in the instruction caches. The maxima of threads and the fast way
  // of references were measured only where it is.
  constexpr bool kOneCode = Work::kValuesBefore < kGroups;

  const auto scores = [&]<int kGroup>(int tile, float(&s)[32]) {
    mbarrier_wait(smem + P::kFull + 8 * (consumer * P::kAllGroups + kGroup), own_uses & 1,
                  "consumer", 10 * consumer + kGroup);
    // Here and not by the threads that stored: it waits for all that a thread has under way, and
    // theirs are the loads of the rows to come.
    if constexpr (Work::kStoredRows) fence_proxy_async_shared();
    // The queries come between tiles 0 and 1, in groups of the same chunks as those of slot 0; the
    // groups of slot 1 hold other chunks, so consumer 1 waits for all of them.
    if (tile == consumer && (consumer == 0 || kGroup == P::kFirstGroup)) {
#pragma unroll
      for (int group = P::kApart && consumer == 1 ? 0 : kGroup;
           group < (consumer == 0 ? kGroup + 1 : P::kAllGroups); ++group) {
        mbarrier_wait(smem + P::kQFull + 8 * group, q_uses & 1, "consumer", 10 * consumer + group);
      }
    }
    multiply_scores<P, kGroup>(smem, consumer, s);
  };

  auto count = work.count(work.first());
  for (auto item = work.first(); item < work.end(); item += work.step()) {
    const int tiles = work.tiles(item, count);
    bool ends = true;
    if constexpr (Work::kParts) ends = work.ends(item, count);
    const auto next_item = item + work.step();
    if (next_item < work.end()) count = work.count(next_item);

    RowState state{
        {kNoReference, kNoReference}, {0, 0}, {negative_infinity(), negative_infinity()}};
    Output o;
#pragma unroll
    for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0;
    if constexpr (Work::kParts) {
      if (tiles > 0) work.template take_over<kConsumer>(item, warp, lane, state, o);
    }

    // The work on one owned tile; kBefore: there is a tile before it, or it is tile 0 and looks for
    // that itself (kOneCode).
    // When the other consumer gets P. Where it cannot go on without P (kOneCode): before P V of the
    // own tile is queued. Where P has its place apart (kMidst): between the halves of that P V, so
    // that the first half runs while the fence waits for the stores. Otherwise behind that P V,
    // which was measured to be faster with P in the slot.
    constexpr bool kMidst = !kOneCode && P::kApart;
    const auto own_tile = [&]<bool kBefore>(int tile) {
      constexpr bool kUnderWay = kBefore && Work::kValuesBefore == kGroups;
      float s[32];
      std::uint32_t p[16];
      // The logits of this tile, as its chunks come, and P V of the tile before, which the other
      // consumer hands over about then: behind them, it runs while the maxima are taken; between
      // them, its rows are replaced before the last chunks of this tile have come.
      const auto other_values = [&]<int kGroup>() {
        if constexpr (kBefore && Work::kValuesBefore == kGroup) {
          if (kOneCode && consumer == 0 && tile == 0) return;
          multiply_other_values<P, !kOneCode>(smem, consumer, other_uses & 1, warp, lane, state, o);
          ++other_uses;
        }
      };
      const auto release_other = [&]<int kGroup>() {
        if constexpr (kBefore && Work::kValuesBefore == kGroup) {
          if (kOneCode && consumer == 0 && tile == 0) return;
          release_values<P, 2, 1>(smem, other, o);
        }
      };
      if constexpr (P::kApart) scores.template operator()<kRopeGroup>(tile, s);
      other_values.template operator()<0>();
      scores.template operator()<0>(tile, s);
      release_other.template operator()<0>();
      other_values.template operator()<1>();
      scores.template operator()<1>(tile, s);
      release_other.template operator()<1>();
      other_values.template operator()<2>();
      scores.template operator()<2>(tile, s);
      release_other.template operator()<2>();
      other_values.template operator()<3>();
      scores.template operator()<3>(tile, s);
      release_other.template operator()<3>();
      const auto mask = ld_shared<std::uint64_t>(smem + P::kMask + 8 * consumer);
      // Whether all logits count as they are: known before they come, since loads take long while
      // products run.
      const bool plain = !kOneCode && ~mask == 0 && scale.sign == 1.0f;
      other_values.template operator()<kGroups>();
      wgmma_wait<kUnderWay ? 2 : 0>();  // the logits are there; P V may still run
      wgmma_pin(s);
      if constexpr (P::kApart) {
        mbarrier_arrive_warp(smem + P::kEmpty + 8 * (consumer * P::kAllGroups + kRopeGroup));
      }
      if (tile + 2 >= tiles) mbarrier_arrive_warp(smem + P::kQFree);

      if (!plain) hide_logits(scale, mask, lane, s);
      float factors[2];
      bool raised = true;
      // The other slot is released before the exponentials, and the half that P V has left first
      // before the maxima: it is refilled while they are taken.
      if constexpr (kUnderWay) {
        wgmma_wait<1>();  // the first half of P V
        release_group<P, 2>(smem, other);
      }
      if constexpr (kOneCode) {
        softmax_reference(scale, s, state, factors);
      } else {
        raised = softmax_reference_of_threads(scale, s, state, factors);
      }
      if constexpr (kUnderWay) {
        wgmma_wait<0>();  // the second half of P V
        release_group<P, 3>(smem, other);
        wgmma_pin(o[0]);
        wgmma_pin(o[1]);
      }
      softmax_weights(scale, s, p, state);
      const auto store = [&] { store_probabilities<P>(smem, consumer, warp, lane, p); };
      const auto hand = [&] { hand_over<P, !kOneCode>(smem, consumer, warp, lane, state); };
      if constexpr (kOneCode) store(), hand();
      if (raised) rescale(o, factors);
      if constexpr (kMidst) store();
      multiply_own_values<P>(smem, consumer, p, o, [&] {
        if constexpr (kMidst) hand();
      });
      if constexpr (!kOneCode && !kMidst) store(), hand();
      release_values<P, 0>(smem, consumer, o);
      wgmma_pin(p);
      ++own_uses;
    };
    constexpr bool kFirstApart = kConsumer == 0 && !kOneCode;
    if constexpr (kFirstApart) {
      if (tiles > 0) own_tile.template operator()<false>(0);
    }
    for (int tile = kFirstApart ? 2 : consumer; tile < tiles; tile += 2) {
      own_tile.template operator()<true>(tile);
    }
    if (tiles > 0) {
      if (consumer == 1 && tiles == 1)
        mbarrier_arrive_warp(smem + P::kQFree);  // it had no use for Q
      if ((tiles - 1) % 2 != consumer) {
        multiply_other_values<P, !kOneCode>(smem, consumer, other_uses & 1, warp, lane, state, o);
        release_values<P, 2>(smem, other, o);
        ++other_uses;
      }
      if constexpr (Work::kParts) {
        if (!ends) work.template hand_on<kConsumer>(warp, lane, state, o);
      }
      if constexpr (!kOneCode) {  // from the maxima of threads to those of rows
        state.top[0] = quad_max(state.top[0]);
        state.top[1] = quad_max(state.top[1]);
      }
      merge_consumers<P>(smem, consumer, q_uses & 1, warp, lane, state);
      ++q_uses;
    }
    if (ends) work.template store<kConsumer>(item, warp, lane, state, o);
  }
}

// Makes the barriers of the consumers and those between them and the third warpgroup. `full`
// gives the arrivals of group `group` of the tile in slot `slot`. One thread; fence_mbarrier_init()
// and __syncthreads() follow.
template <class P, class Full>
__device__ __forceinline__ void init_barriers(std::uint32_t smem, const Full& full) {
  if (smem % 1024 != 0) __trap();  // the swizzle is one of address bits
  for (int i = 0; i < 2 * P::kAllGroups; ++i) {
    mbarrier_init(smem + P::kFull + 8 * i, full(i / P::kAllGroups, i % P::kAllGroups));
    mbarrier_init(smem + P::kEmpty + 8 * i, kWarpsPerConsumer * kWarpArrival);
  }
  for (int i = 0; i < P::kAllGroups; ++i) mbarrier_init(smem + P::kQFull + 8 * i, kGatherThreads);
  for (int i = 0; i < 2; ++i)
    mbarrier_init(smem + P::kPReady + 8 * i, kWarpsPerConsumer * kWarpArrival);
  mbarrier_init(smem + P::kQFree, 2 * kWarpsPerConsumer * kWarpArrival);
  mbarrier_init(smem + P::kSumReady, 2 * kWarpsPerConsumer * kWarpArrival);
}

}  // namespace winnow::sparse_mla::attention_sm90
