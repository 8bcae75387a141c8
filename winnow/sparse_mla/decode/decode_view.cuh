// Decode: what calls name, as the kernels of every GPU see it.
#pragma once

#include <cstdint>

#include "winnow/cache/cache_view.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/sparse_mla/decode/decode_impl.h"

namespace winnow::sparse_mla {

// A cache, and the rows that the queries chose of it. Strides count elements.
struct ChosenView {
  CacheView<const std::uint8_t> cache;
  device::FastDivmod of_block;  // divides a slot by the cache's block_size
  const std::int32_t* indices;
  std::int64_t indices_stride_b, indices_stride_s;
  const std::int32_t* topk_length;  // may be null
  std::int64_t topk_length_stride_b, topk_length_stride_s;
  std::int32_t topk, tiles;  // of `topk` entries
};

// A tensor [b, s_q, h_q, columns]. Strides count bytes.
struct HeadsView {
  char* data;
  std::int64_t stride_b, stride_s, stride_h;
  __device__ bool present() const { return data != nullptr; }
  __device__ char* at(std::uint32_t i, std::uint32_t s, int h) const {
    return data + i * stride_b + s * stride_s + h * stride_h;
  }
};

// The tiles of kRows entries that the table of a cache has room for.
template <int kRows>
std::int64_t tiles_of(const ChosenRows& chosen) {
  return device::ceil_div<std::int64_t>(chosen.topk, kRows);
}

template <class Pointer>
HeadsView heads_view(const Heads<Pointer>& heads, std::int64_t element) {
  return {static_cast<char*>(const_cast<void*>(static_cast<const void*>(heads.data))),
          heads.stride_b * element, heads.stride_s * element, heads.stride_h * element};
}

template <int kRows>
ChosenView chosen_view(const DecodeParams& params, const ChosenRows& chosen) {
  ChosenView view;
  view.cache = cache_view(chosen.cache);
  // Copies of absent rows name slot 0 and read nothing; without slots, q stands in for the cache.
  if (view.cache.slots == 0) view.cache.data = static_cast<const std::uint8_t*>(params.q.data);
  view.of_block = device::FastDivmod(view.cache.block_size);
  view.indices = chosen.indices.data;
  view.indices_stride_b = chosen.indices.stride0;
  view.indices_stride_s = chosen.indices.stride1;
  view.topk_length = chosen.topk > 0 ? chosen.topk_length.data : nullptr;
  view.topk_length_stride_b = chosen.topk_length.stride0;
  view.topk_length_stride_s = chosen.topk_length.stride1;
  view.topk = static_cast<std::int32_t>(chosen.topk);
  view.tiles = static_cast<std::int32_t>(tiles_of<kRows>(chosen));
  return view;
}

}  // namespace winnow::sparse_mla
