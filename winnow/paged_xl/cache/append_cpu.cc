// Writing into the paged cache on the CPU. Elements move as bits of their size.
#include <cstring>

#include "winnow/paged_xl/cache/append_impl.h"

namespace winnow::paged_xl {
namespace {

template <class Bits>
void append_token(const AppendParams& params, std::int64_t token, std::int64_t block,
                  std::int64_t offset, std::int64_t head) {
  constexpr std::int64_t kX = 16 / sizeof(Bits);
  const std::int64_t block_size = params.cache.block_size, head_size = params.cache.head_size;
  const Bits* key = static_cast<const Bits*>(params.key.data) + params.key.offset(token, head);
  const Bits* value =
      static_cast<const Bits*>(params.value.data) + params.value.offset(token, head);
  Bits* to_key = static_cast<Bits*>(params.key_cache.data) + params.key_cache.offset(block, head) +
                 offset * kX;
  Bits* to_value =
      static_cast<Bits*>(params.value_cache.data) + params.value_cache.offset(block, head) + offset;
  for (std::int64_t d = 0; d < head_size; d += kX) {
    std::memcpy(to_key + d * block_size, key + d, 16);
  }
  for (std::int64_t d = 0; d < head_size; ++d) to_value[d * block_size] = value[d];
}

}  // namespace

void append_cpu(const AppendParams& params, const Executor& executor) {
  constexpr std::int64_t kTokens = 16;  // tokens of one block mostly, whose lines stay in the cache
  const std::int64_t block_size = params.cache.block_size;
  const std::int64_t size = size_of(params.cache.dtype);
  const auto append_one = size == 8   ? append_token<std::uint64_t>
                          : size == 4 ? append_token<std::uint32_t>
                                      : append_token<std::uint16_t>;
  executor.for_each_range(params.num_tokens, kTokens,
                          [&](std::int64_t begin, std::int64_t end, int) {
                            for (std::int64_t head = 0; head < params.cache.num_kv_heads; ++head) {
                              for (std::int64_t token = begin; token < end; ++token) {
                                // Another thread may have changed the slot since it was checked.
                                const std::int64_t slot = params.slots[token];
                                const std::int64_t block = slot / block_size;
                                if (slot < 0 || block >= params.cache.num_blocks) continue;
                                append_one(params, token, block, slot % block_size, head);
                              }
                            }
                          });
}

}  // namespace winnow::paged_xl
