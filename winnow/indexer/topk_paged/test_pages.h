// Inputs that the tests of topk_paged() and scores_paged() share.
#pragma once

#include <cstdint>
#include <numeric>

#include "winnow/core/tensor.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/testing/generate.h"

namespace winnow::indexer {

// Of one sequence: its queries and its pages.
struct SequenceInPages {
  Tensor q, weights, pages, table, context{DType::i32, {1}};

  SequenceInPages(std::int64_t s_q, std::int64_t h, std::int64_t d, std::int64_t all_pages,
                  std::int64_t own_pages, std::int32_t rows)
      : q(DType::f8_e4m3, {1, s_q, h, d}),
        weights(DType::f32, {1, s_q, h}),
        pages(DType::u8, {all_pages, page_bytes(d)}),
        table(DType::i32, {1, own_pages}) {
    context.values<std::int32_t>()[0] = rows;
  }
  template <class Args>
  Args args(Args args) const {
    args.q = q;
    args.pages = pages;
    args.weights = weights;
    args.block_tables = table;
    args.context_lens = context;
    return args;
  }
};

// Position p of 70 has the key p + 1 in its first column. Two queries have the weight 2. The second
// page begins at position 64.
struct PagesByHand : SequenceInPages {
  PagesByHand() : SequenceInPages(2, 1, 64, 4, 2, 70) {
    Tensor keys(DType::f32, {70, 64}), slots(DType::i32, {70});
    table.values<std::int32_t>()[0] = 3;
    table.values<std::int32_t>()[1] = 1;
    for (std::int32_t p = 0; p < 70; ++p) {
      keys.view().at<float>(p, 0) = static_cast<float>(p + 1);
      slots.values<std::int32_t>()[p] = p < 64 ? 3 * 64 + p : p;
    }
    quantize({.x = keys, .pages = pages, .slots = slots});
    for (std::int64_t j = 0; j < 2; ++j) {
      q.view().at<Float8E4M3>(0, j, 0, 0) = Float8E4M3(1.0f);
      weights.view().at<float>(0, j, 0) = 2.0f;
    }
  }
};

// Random keys, the same for operations without pages: the pages follow each other.
struct ConsecutivePages : SequenceInPages {
  static constexpr std::int64_t kRows = 640, kHeads = 8, kWidth = 128;
  Tensor k{DType::f8_e4m3, {kRows, kWidth}}, k_scale{DType::f32, {kRows}};

  explicit ConsecutivePages(std::int64_t s_q)
      : SequenceInPages(s_q, kHeads, kWidth, kRows / 64, kRows / 64, kRows) {
    Tensor keys(DType::f32, {kRows, kWidth}), slots(DType::i64, {kRows});
    testing::Random random(3);
    testing::fill_normal(keys, random);
    std::iota(slots.values<std::int64_t>().begin(), slots.values<std::int64_t>().end(), 0);
    std::iota(table.values<std::int32_t>().begin(), table.values<std::int32_t>().end(), 0);
    quantize({.x = keys, .rows = k, .scale = k_scale});
    quantize({.x = keys, .pages = pages, .slots = slots});
    testing::fill_normal(q, random);
    testing::fill_normal(weights, random);
  }
  // Of topk() or scores().
  template <class Args>
  Args dense(Args args) const {
    const std::int64_t s_q = q.size(1);
    args.q = ConstTensorView(q.data(), DType::f8_e4m3, {s_q, kHeads, kWidth});
    args.k = k;
    args.weights = ConstTensorView(weights.data(), DType::f32, {s_q, kHeads});
    args.k_scale = k_scale;
    args.q_start = kRows - s_q;
    return args;
  }
};

}  // namespace winnow::indexer
