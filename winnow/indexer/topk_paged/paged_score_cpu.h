// Scores of the rows of a paged cache on the CPU, blocks of kPages pages at a time. Internal;
// compiled once per instruction set.
#pragma once

#include <cstring>

#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/score_cpu.h"
#include "winnow/indexer/topk_paged/paged_problem.h"

namespace winnow::indexer {

inline constexpr std::int64_t kPages = kBlock / kPageRows;  // of a block
static_assert(kBlock % kPageRows == 0);

// The queries of one sequence as a problem of their own, without keys.
inline Problem sequence_of(const PagedProblem& paged, std::int64_t i) {
  Problem problem;
  problem.dtype = DType::f8_e4m3;
  problem.s_q = paged.s_q;
  problem.h = paged.h;
  problem.d = paged.d;
  problem.q = {static_cast<const std::uint8_t*>(paged.q.data) + paged.q.offset(i), paged.q.stride1,
               paged.q_head_stride};
  problem.weights_dtype = paged.weights_dtype;
  problem.weights = {static_cast<const std::uint8_t*>(paged.weights.data) +
                         paged.weights.offset(i) * size_of(paged.weights_dtype),
                     paged.weights.stride1, 0};
  return problem;
}

// The pages of a block; null where one is absent.
using PagesOfBlock = const std::uint8_t* [kPages];

// Loads the keys of a block of sequence i, of which rows below `rows` are seen by some query. What
// nobody sees is not read, neither entries of the table nor rows: they may hold anything.
inline void load_pages(const PagedProblem& paged, std::int64_t i, std::int64_t block,
                       std::int64_t rows, Scorer& scorer, PagesOfBlock& pages) {
  // Reads the entry once, since another thread may change it after the check.
  const auto page_at = [&](std::int64_t place) -> const std::uint8_t* {
    if (place * kPageRows >= rows || place >= paged.table) return nullptr;
    const std::int64_t page =
        read_once(paged.block_tables.data + paged.block_tables.offset(i) + place);
    if (page < 0 || page >= paged.num_pages) return nullptr;
    return paged.pages.data + paged.pages.offset(page);
  };
  for (std::int64_t p = 0; p < kPages; ++p) pages[p] = page_at(block * kPages + p);
  scorer.load_keys_at(DType::f8_e4m3, [&](std::int64_t r) -> Scorer::Key {
    const std::uint8_t* const page = pages[r / kPageRows];
    if (block * kBlock + r >= rows || page == nullptr) return {};
    const std::int64_t row = r % kPageRows;
    float scale = 0;  // copied, since pages need not be aligned to 4 bytes
    std::memcpy(&scale, page + kPageRows * paged.d + row * std::int64_t{sizeof scale},
                sizeof scale);
    return {page, row * paged.d, scale};
  });
}

}  // namespace winnow::indexer
