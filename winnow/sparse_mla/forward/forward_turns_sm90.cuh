// Which tiles of which items a block of the forward kernel of sm90 works on, and in which order.
//
// Each block takes one item a round. The items that do not fill a last round would leave most
// multiprocessors idle for its time. So their tiles are laid end to end and divided into stretches
// of `chunk`, one for each block; a stretch that crosses from one item to the next is two parts. A
// part that does not end its item hands its state (references, sums, largest logits, the output in
// f32) to the next block, which goes on from there. The tiles of an item are still added one after
// the other, so every result has the same bits as if one block had made it.
//
//   block 0   item 6, 0-21 | item 0 | item 3                     6 items in two rounds, and 2 left
//   block 1   item 7, 0-11 | item 1 | item 4 | item 6, 22-31     of 32 tiles each: 22 of these
//   block 2                  item 2 | item 5 | item 7, 12-31     tiles for a block
//
// A block runs the part that begins an item first, if it has one. A part that goes on with an item
// runs between or after the whole items, the later the further back in its item it is, so that the
// state it takes over was stored long before. A block waits only for the block numbered one lower,
// which has started earlier: the blocks need not all run at the same time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/host_device.h"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/scratch.h"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/attention_sm90.cuh"

namespace winnow::sparse_mla::forward_sm90_detail {

using namespace winnow::sparse_mla::attention_sm90;

// Of a launch; made on the host.
struct Rounds {
  std::uint32_t blocks;  // of the grid
  std::uint32_t full;    // rounds: block b takes the items b, blocks + b, ...
  std::uint32_t left;    // items that do not fill another one
  int tiles;             // of the longest item, rounded up to an even number; 0 if chunk is
  int chunk;             // tiles of a block, an even number; 0: the items left over stay whole
};

// The bits are the same whether the items left over are cut or not; cutting is only faster.
inline Rounds make_rounds(std::uint32_t items, std::uint32_t blocks, std::int64_t tiles,
                          bool may_hand_on) {
  // What a part costs beside its tiles, in tiles.
  constexpr std::int64_t kOverhead = 6;
  const auto even = [](std::int64_t count) { return (count + 1) / 2 * 2; };
  Rounds rounds{blocks, items / blocks, items % blocks, 0, 0};
  if (!may_hand_on || rounds.full == 0 || rounds.left == 0) return rounds;
  const std::int64_t whole = even(tiles);
  // An item's parts follow each other, a round apart.
  const std::int64_t chunk = even(std::max((rounds.left * whole + blocks - 1) / blocks,
                                           (whole + rounds.full) / (rounds.full + 1)));
  if (chunk + kOverhead >= whole) return rounds;
  rounds.tiles = static_cast<int>(whole);
  rounds.chunk = static_cast<int>(chunk);
  return rounds;
}

// Tiles [first, end) of an item.
struct Part {
  std::uint32_t item;
  int first, end;
};
inline constexpr int kToTheEnd = 0x7fffffff;

// The turns of a block, in shared memory.
class Turns {
 public:
  // One thread. __syncthreads() follows.
  __device__ void plan(const Rounds& rounds) {
    const std::uint32_t block = blockIdx.x;
    begins_ = 0;
    late_round_ = kNever;
    turns_ = rounds.full;
    if (rounds.chunk == 0) {
      turns_ += block < rounds.left ? 1 : 0;
      return;
    }
    const std::int64_t begin = std::int64_t{block} * rounds.chunk;
    const std::int64_t all = std::int64_t{rounds.left} * rounds.tiles;
    const int count = static_cast<int>(min(std::int64_t{rounds.chunk}, all - begin));
    if (count <= 0) return;
    const auto number = static_cast<std::uint32_t>(begin / rounds.tiles);
    const int first = static_cast<int>(begin % rounds.tiles);
    const int end = min(rounds.tiles, first + count);
    const std::uint32_t item = rounds.full * rounds.blocks + number;
    if (first == 0) {
      add_beginning({item, 0, end});
      return;
    }
    // Of the item's parts this one is number block - from, and the last one number to - from.
    const auto from = static_cast<std::uint32_t>((begin - first) / rounds.chunk);
    const auto to = static_cast<std::uint32_t>((begin - first + rounds.tiles - 1) / rounds.chunk);
    late_ = {item, first, end};
    late_round_ = rounds.full * (block - from) / (to - from);
    ++turns_;
    if (first + count > rounds.tiles) add_beginning({item + 1, 0, first + count - rounds.tiles});
  }

  __device__ std::uint32_t count() const { return turns_; }

  __device__ __forceinline__ Part part(const Rounds& rounds, std::uint32_t turn) const {
    if (turn < begins_) return beginning_;
    std::uint32_t round = turn - begins_;
    if (round == late_round_) return late_;
    if (round > late_round_) --round;
    return {round * rounds.blocks + blockIdx.x, 0, kToTheEnd};
  }

 private:
  static constexpr std::uint32_t kNever = 0xffffffff;

  __device__ void add_beginning(const Part& part) {
    beginning_ = part;
    begins_ = 1;
    ++turns_;
  }

  std::uint32_t turns_, begins_, late_round_;  // late_ comes before this round
  Part beginning_, late_;
};

// --- what is handed on ---------------------------------------------------------------------------

// What a block hands on: 34 words of 16 bytes of each consumer thread, as the threads hold them: 32
// of the output, one of references and sums, one of largest logits.
inline constexpr int kHandedWords = 34;
inline constexpr std::int64_t kHandedBytes = std::int64_t{kHandedWords} * 2 * 128 * 16;
// A flag for each consumer warp of a block, 0 before the launch.
inline constexpr int kHandingWarps = 2 * kWarpsPerConsumer;

WINNOW_HOST_DEVICE inline std::int64_t flag_bytes(std::uint32_t blocks) {
  return scratch_bytes(std::int64_t{blocks} * kHandingWarps * 4);
}
inline std::int64_t handed_bytes(std::uint32_t blocks) {
  return flag_bytes(blocks) + blocks * kHandedBytes;
}

// Each consumer warp hands its part of the state to the same warp of the next block.
template <int kConsumer>
class Handed {
 public:
  __device__ __forceinline__ Handed(char* memory, std::uint32_t blocks, std::uint32_t block,
                                    int warp, int lane)
      : flag_(reinterpret_cast<std::uint32_t*>(memory) + block * kHandingWarps +
              kConsumer * kWarpsPerConsumer + warp),
        words_(reinterpret_cast<float4*>(memory + flag_bytes(blocks) + block * kHandedBytes) +
               kConsumer * kHandedWords * 128 + 32 * warp + lane),
        lane_(lane) {}

  __device__ __forceinline__ void give(const RowState& state, const Output& o) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float* const four = &o[i / 16][4 * (i % 16)];
      words_[128 * i] = make_float4(four[0], four[1], four[2], four[3]);
    }
    words_[128 * 32] =
        make_float4(state.reference[0], state.reference[1], state.sum[0], state.sum[1]);
    words_[128 * 33] = make_float4(state.top[0], state.top[1], 0, 0);
    __syncwarp();
    if (lane_ == 0) st_release_gpu(flag_, 1);  // of what all lanes have stored
  }

  __device__ __forceinline__ void take(RowState& state, Output& o) {
    if (lane_ == 0) {
      while (ld_acquire_gpu(flag_) == 0) {
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float* const four = &o[i / 16][4 * (i % 16)];
      const float4 word = load_now(words_ + 128 * i);
      four[0] = word.x, four[1] = word.y, four[2] = word.z, four[3] = word.w;
    }
    const float4 sums = load_now(words_ + 128 * 32), tops = load_now(words_ + 128 * 33);
    state.reference[0] = sums.x, state.reference[1] = sums.y;
    state.sum[0] = sums.z, state.sum[1] = sums.w;
    state.top[0] = tops.x, state.top[1] = tops.y;
  }

 private:
  std::uint32_t* flag_;
  float4* words_;
  int lane_;
};

}  // namespace winnow::sparse_mla::forward_sm90_detail
