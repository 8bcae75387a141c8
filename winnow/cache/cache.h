// Paged caches behind the entry points: their plain descriptions, and the checks that make them.
// Internal.
#pragma once

#include <cstdint>
#include <string_view>

#include "winnow/cache/cache_format.h"
#include "winnow/cache/key_page.h"
#include "winnow/core/host_device.h"
#include "winnow/core/rows.h"
#include "winnow/core/slots.h"
#include "winnow/core/tensor.h"

namespace winnow {
class Check;
}

namespace winnow::sparse_mla {

// A cache of any format; Byte is std::uint8_t, const or not. Slot t is row t % block_size of block
// t / block_size, and there are fewer than 2^31 slots.
template <class Byte>
struct Cache {
  CacheFormat format = CacheFormat::fp8_656;
  Byte* data = nullptr;
  std::int64_t blocks = 0, block_size = 0;
  std::int64_t columns = 0;       // what a row stands for: 576 or 512
  std::int64_t block_stride = 0;  // in bytes, of any sign
  std::int64_t row_stride = 0;    // in bytes, of any sign; in fp8_584 always 576

  bool present() const { return data != nullptr; }
  std::int64_t slots() const { return blocks * block_size; }
  bool holds(std::int64_t slot) const { return slot >= 0 && slot < slots(); }

  // Where the row of a slot begins, and in fp8_584 its scales.
  Byte* row(std::int64_t slot) const {
    return data + slot / block_size * block_stride + slot % block_size * row_stride;
  }
  Byte* scales_584(std::int64_t slot) const {
    return data + slot / block_size * block_stride +
           Row584::scale_offset(block_size, slot % block_size);
  }
};

// The format's columns of q and of rows that go into the cache: 576, 512, or in bf16 the cache's
// own.
std::int64_t cache_columns(CacheFormat format, const ConstTensorView& cache);

// Checks shape, dtype, device and strides of a cache; throws Error naming `argument`, and
// for another row size the formats.
Cache<const std::uint8_t> check_cache(const Check& check, std::string_view argument,
                                      const ConstTensorView& view, CacheFormat format,
                                      Device device);
// The same for an output, of which no two rows may share memory.
Cache<std::uint8_t> check_cache_output(const Check& check, std::string_view argument,
                                       const TensorView& view, CacheFormat format, Device device);

// What GPU kernels want beyond that: rows, and in fp8_584 blocks, that begin at multiples of 16
// bytes.
void check_cache_for_gpu(const Check& check, std::string_view argument, const ConstTensorView& view,
                         CacheFormat format);

// The slots of a cache. Without rows it has none either, whatever its block_size is.
inline SlotSpace slot_space(const Cache<std::uint8_t>& cache, std::string_view row_noun) {
  const bool none = cache.block_size == 0;
  return {none ? 0 : cache.blocks, none ? 1 : cache.block_size, "blocks", row_noun};
}

}  // namespace winnow::sparse_mla

namespace winnow::indexer {

// Pages of keys.
struct KeyPages {
  Rows<std::uint8_t*> pages;
  std::int64_t count = 0, d = 0;
  bool power_of_two = false;  // their scales are powers of two

  bool present() const { return pages.present(); }
  WINNOW_HOST_DEVICE bool holds(std::int64_t slot) const {
    return slot >= 0 && slot / kPageRows < count;
  }
};

// Checks shape, dtype, device and strides of an output of pages; throws Error naming `argument`.
KeyPages check_key_pages(const Check& check, std::string_view argument, const TensorView& view,
                         std::int64_t d, bool power_of_two, Device device);

// What GPU kernels want beyond that.
void check_key_pages_for_gpu(const Check& check, std::string_view argument, const TensorView& view);

}  // namespace winnow::indexer
