// The convention of paged_xl, proved: a decode loop over a paged cache equals full relative
// attention as it is defined for whole sequences, with the relative shift.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/paged_xl/position_term/position_term.h"

namespace winnow::paged_xl {
namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kHeadSize = 32, kModel = 48, kBlockSize = 8;

using Numbers = std::vector<double>;

// Projected relative embeddings as Transformer-XL has them: W_kR times the sinusoid of each
// distance. [kHeads, distances, kHeadSize], rounded to the dtype.
Tensor make_r(DType dtype, std::int64_t distances) {
  testing::Random random(3);
  Numbers weight(static_cast<std::size_t>(kHeads * kHeadSize * kModel));
  for (double& w : weight) w = random.normal() / std::sqrt(double(kModel));
  Tensor r(dtype, {kHeads, distances, kHeadSize});
  for (std::int64_t h = 0; h < kHeads; ++h) {
    for (std::int64_t distance = 0; distance < distances; ++distance) {
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        double sum = 0;
        for (std::int64_t m = 0; m < kModel; ++m) {
          const double frequency = std::pow(10000.0, -double(m % (kModel / 2)) / (kModel / 2));
          const double angle = double(distance) * frequency;
          sum += weight[static_cast<std::size_t>((h * kHeadSize + d) * kModel + m)] *
                 (m < kModel / 2 ? std::sin(angle) : std::cos(angle));
        }
        if (dtype == DType::f32) {
          r.view().at<float>(h, distance, d) = static_cast<float>(sum);
        } else {
          r.view().at<BFloat16>(h, distance, d) = BFloat16(static_cast<float>(sum));
        }
      }
    }
  }
  return r;
}

// Section 3.3 and appendix B of Dai et al. 2019 for one head of a whole sequence, in double:
// BD[i, p] = (q_i + v) r_p with the distances of p in descending order, shifted so that column j
// of row i holds the distance i - j; then the masked softmax. Rows are n * kHeadSize numbers.
Numbers full_attention(const Numbers& q, const Numbers& k, const Numbers& value, const Numbers& u,
                       const Numbers& v, const Numbers& r, std::int64_t n) {
  const auto at = [](const Numbers& rows, std::int64_t row, std::int64_t d) {
    return rows[static_cast<std::size_t>(row * kHeadSize + d)];
  };
  Numbers ac(static_cast<std::size_t>(n * n)), bd(static_cast<std::size_t>(n * n));
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        ac[static_cast<std::size_t>(i * n + j)] += (at(q, i, d) + at(u, 0, d)) * at(k, j, d);
        bd[static_cast<std::size_t>(i * n + j)] +=
            (at(q, i, d) + at(v, 0, d)) * at(r, n - 1 - j, d);
      }
    }
  }
  // The relative shift: a column of zeros on the left, the same memory seen as n + 1 rows of n
  // entries, its first row dropped.
  Numbers padded;
  for (std::int64_t i = 0; i < n; ++i) {
    padded.push_back(0);
    padded.insert(padded.end(), bd.begin() + i * n, bd.begin() + (i + 1) * n);
  }
  const Numbers shifted(padded.begin() + n, padded.end());

  Numbers out(static_cast<std::size_t>(n * kHeadSize));
  const double scale = 1 / std::sqrt(double(kHeadSize));
  for (std::int64_t i = 0; i < n; ++i) {
    Numbers p;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t j = 0; j <= i; ++j) {
      const auto ij = static_cast<std::size_t>(i * n + j);
      p.push_back(scale * (ac[ij] + shifted[ij]));
      largest = std::max(largest, p.back());
    }
    for (double& x : p) sum += x = std::exp(x - largest);
    for (std::int64_t j = 0; j <= i; ++j) {
      for (std::int64_t d = 0; d < kHeadSize; ++d) {
        out[static_cast<std::size_t>(i * kHeadSize + d)] +=
            p[static_cast<std::size_t>(j)] / sum * at(value, j, d);
      }
    }
  }
  return out;
}

Numbers head_of(const Tensor& tensor, std::int64_t h) {
  return testing::read(tensor.view().slice(1, h, h + 1));
}

class RelativeShift : public ::testing::TestWithParam<DType> {};

TEST_P(RelativeShift, DecodeLoopEqualsFullAttention) {
  const DType dtype = GetParam();
  const std::vector<std::int64_t> lengths = {45, 17};
  constexpr std::int64_t kBlocksPerSeq = 6, kLongest = kBlocksPerSeq * kBlockSize;
  const auto num_seqs = static_cast<std::int64_t>(lengths.size());
  testing::Random random(7);
  std::vector<Tensor> q, k, value;
  for (const std::int64_t n : lengths) {
    for (auto* list : {&q, &k, &value}) {
      const std::int64_t heads = list == &q ? kHeads : kKvHeads;
      list->emplace_back(dtype, std::initializer_list<std::int64_t>{n, heads, kHeadSize});
      testing::fill_normal(list->back(), random);
    }
  }
  Tensor u(dtype, {kHeads, kHeadSize}), v(dtype, {kHeads, kHeadSize});
  testing::fill_normal(u, random);
  testing::fill_normal(v, random);
  const Tensor r = make_r(dtype, kLongest);

  std::vector<std::vector<Numbers>> expected;  // [sequence][head]
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    expected.emplace_back();
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const std::int64_t kv = h / (kHeads / kKvHeads);
      expected.back().push_back(full_attention(
          head_of(q[s], h), head_of(k[s], kv), head_of(value[s], kv),
          testing::read(u.view().slice(0, h, h + 1)), testing::read(v.view().slice(0, h, h + 1)),
          testing::read(r.view().slice(0, h, h + 1)), lengths[s]));
    }
  }

  // The loop: both sequences grow by a token a step; the shorter one stops.
  const std::int64_t x = 16 / size_of(dtype), num_blocks = num_seqs * kBlocksPerSeq;
  Tensor key_cache(dtype, {num_blocks, kKvHeads, kHeadSize / x, kBlockSize, x});
  Tensor value_cache(dtype, {num_blocks, kKvHeads, kHeadSize, kBlockSize});
  testing::fill_unwritten(key_cache);
  testing::fill_unwritten(value_cache);
  Tensor tables(DType::i32, {num_seqs, kBlocksPerSeq}), lens(DType::i32, {1});
  testing::fill_distinct(TensorView(tables.data(), DType::i32, {num_blocks}), random, num_blocks);
  Tensor slot(DType::i32, {1}), plain(dtype, {1, kHeads, kHeadSize});
  Tensor fused(dtype, {1, kHeads, kHeadSize}), matrix_bd(DType::f32, {1, kHeads, kLongest});
  for (std::int64_t t = 0; t < kLongest; ++t) {
    for (std::int64_t s = 0; s < num_seqs; ++s) {
      const auto seq = static_cast<std::size_t>(s);
      if (t >= lengths[seq]) continue;
      const std::int32_t block = tables.view().at<std::int32_t>(s, t / kBlockSize);
      slot.view().at<std::int32_t>(0) =
          static_cast<std::int32_t>(block * kBlockSize + t % kBlockSize);
      append({k[seq].view().slice(0, t, t + 1), value[seq].view().slice(0, t, t + 1), slot,
              key_cache, value_cache});
      lens.view().at<std::int32_t>(0) = static_cast<std::int32_t>(t + 1);
      const ConstTensorView query = q[seq].view().slice(0, t, t + 1);
      testing::fill_unwritten(matrix_bd);
      position_term({query, v, r, lens, matrix_bd});
      AttentionArgs args;
      args.query = query;
      args.key_cache = key_cache;
      args.value_cache = value_cache;
      args.pos_bias_u = u;
      args.block_tables = tables.view().slice(0, s, s + 1);
      args.context_lens = lens;
      AttentionArgs fused_args = args;
      args.matrix_bd = matrix_bd;
      args.out = plain;
      attention(args);
      fused_args.pos_bias_v = v;
      fused_args.r = r;
      fused_args.out = fused;
      attention(fused_args);

      Numbers row;
      for (const Numbers& head : expected[seq]) {
        row.insert(row.end(), head.begin() + t * kHeadSize, head.begin() + (t + 1) * kHeadSize);
      }
      for (const auto& [name, out] : {std::pair{"plain", &plain}, {"fused", &fused}}) {
        const testing::Comparison result =
            testing::compare(name, *out, row, tolerance(Quantity::out, dtype, 0));
        ASSERT_TRUE(result.passed)
            << name << ", sequence " << s << ", step " << t << ": " << result.detail;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RelativeShift, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& one) { return std::string(to_string(one.param)); });

}  // namespace
}  // namespace winnow::paged_xl
