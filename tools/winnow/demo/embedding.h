// Turns bytes into the queries and the latent rows of an MLA layer by fixed seeded projections.
#pragma once

#include <cstdint>
#include <string_view>

#include "winnow/core/tensor.h"

namespace winnow::demo {

inline constexpr std::int64_t kNopeDim = 512;
inline constexpr std::int64_t kRopeDim = 64;
inline constexpr std::int64_t kRowDim = kNopeDim + kRopeDim;  // d_qk
inline constexpr std::int64_t kHeads = 16;
// How many bytes, itself and those just before, a row tells about.
inline constexpr int kContext = 4;

struct Embedding {
  Tensor q;   // [tokens, kHeads, kRowDim], f32
  Tensor kv;  // [tokens, 1, kRowDim], f32
};

// Every byte of `text` becomes a token. A row says which byte stands there and which ones stood 1,
// 2 and 3 places before (each a fixed random direction of the 512 columns), and where it is (rotary
// angles in the 64 columns). The heads ask four kinds of questions:
//   nearby     what stands just before me?
//   after      what followed earlier occurrences of my byte? (the key's previous byte is mine)
//   after two  the same for my last two bytes: an induction head
//   alike      which places look like mine, in their last three bytes?
// All of them prefer recent rows, more or less. The strengths are chosen so that the softmax is
// neither flat nor on a single row.
Embedding embed(std::string_view text);

}  // namespace winnow::demo
