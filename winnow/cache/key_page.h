// The pages of a paged cache of the lightning indexer's keys.
#pragma once

#include <cstdint>

namespace winnow::indexer {

// The rows in a page. A page of rows with d columns has kPageRows * d bytes of f8_e4m3, then
// kPageRows scales in f32.
inline constexpr std::int64_t kPageRows = 64;
constexpr std::int64_t page_bytes(std::int64_t d) { return kPageRows * (d + 4); }

}  // namespace winnow::indexer
