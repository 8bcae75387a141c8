#include "winnow/paged_xl/problem.h"

#include <algorithm>
#include <array>

#include "winnow/core/check.h"
#include "winnow/core/read_once.h"

namespace winnow::paged_xl {
namespace {

constexpr std::array<std::int64_t, 9> kHeadSizes = {32, 64, 80, 96, 112, 128, 160, 192, 256};
constexpr std::array<std::int64_t, 5> kBlockSizes = {8, 16, 32, 64, 128};

template <std::size_t N>
void check_one_of(const Check& check, std::string_view argument, std::string_view dim,
                  const std::array<std::int64_t, N>& allowed, std::int64_t got) {
  if (std::find(allowed.begin(), allowed.end(), got) != allowed.end()) return;
  std::string wanted = std::string(dim) + " one of";
  for (const std::int64_t value : allowed) {
    wanted += (value == allowed.front() ? " " : ", ") + std::to_string(value);
  }
  check.that(false, argument, wanted, std::to_string(got));
}

// The dimensions after block and head follow each other without gaps.
void check_dense_blocks(const Check& check, std::string_view argument,
                        const ConstTensorView& cache) {
  if (cache.numel() == 0) return;
  std::int64_t stride = 1;
  for (int dim = cache.rank() - 1; dim >= 2; stride *= cache.size(dim--)) {
    check.that(cache.stride(dim) == stride, argument, "each block of a head without gaps",
               to_string(cache));
  }
}

}  // namespace

CacheShape check_cache(const Check& check, const ConstTensorView& key_cache,
                       const ConstTensorView& value_cache, DType dtype, Device device) {
  check.rank("key_cache", key_cache, 5, "[num_blocks, num_kv_heads, head_size/x, block_size, x]");
  check.rank("value_cache", value_cache, 4, "[num_blocks, num_kv_heads, head_size, block_size]");
  const CacheShape cache = {dtype, key_cache.size(0), key_cache.size(1), value_cache.size(2),
                            value_cache.size(3)};
  check_one_of(check, "value_cache", "head_size", kHeadSizes, cache.head_size);
  check_one_of(check, "value_cache", "block_size", kBlockSizes, cache.block_size);
  const Dim num_blocks{"num_blocks", cache.num_blocks};
  const Dim num_kv_heads{"num_kv_heads", cache.num_kv_heads};
  const Dim block_size{"block_size", cache.block_size};
  check.dtype("key_cache", key_cache, {dtype});
  check.input("key_cache", key_cache,
              {num_blocks,
               num_kv_heads,
               {"head_size/x", cache.head_size / cache.x()},
               block_size,
               {"x", cache.x()}},
              {dtype}, device);
  check.input("value_cache", value_cache,
              {num_blocks, num_kv_heads, {"head_size", cache.head_size}, block_size}, {dtype},
              device);
  check_dense_blocks(check, "key_cache", key_cache);
  check_dense_blocks(check, "value_cache", value_cache);
  return cache;
}

void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& query) {
  check.finite("scale", scale, query.dtype());
}

void check_head_size(const Check& check, const ConstTensorView& query) {
  check_one_of(check, "query", "head_size", kHeadSizes, query.size(2));
}

void check_matrix_bd(const Check& check, const ConstTensorView& matrix_bd,
                     const ConstTensorView& query) {
  check.rank("matrix_bd", matrix_bd, 3, "[num_seqs, num_heads, columns]");
  check.dtype("matrix_bd", matrix_bd, {query.dtype(), accumulator_of(query.dtype())});
}

Rows<const void*> pos_bias_of(const ConstTensorView& bias) {
  if (bias.rank() == 3) return rows_of<const void*>(bias, 0, 1);
  return {bias.data(), 0, bias.stride(0)};
}

void check_lengths(const Check& check, const std::int32_t* context_lens, std::int64_t num_seqs,
                   std::int64_t limit, std::string_view reason) {
  for (std::int64_t s = 0; s < num_seqs; ++s) {
    const std::int32_t length = read_once(context_lens + s);
    if (length >= 0 && length <= limit) continue;
    check.that(false, "context_lens",
               "0 to " + std::to_string(limit) + " (" + std::string(reason) + ")",
               std::to_string(length) + " for sequence " + std::to_string(s));
  }
}

}  // namespace winnow::paged_xl
