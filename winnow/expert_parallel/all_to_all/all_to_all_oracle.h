// What dispatch and combine do, with the whole world in one place: every rank's inputs go in, any
// rank's results come out, bit for bit. Plain loops; it shares no code with the layer.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel::oracle {

struct RankInput {
  ConstTensorView input;           // [n, H]
  ConstTensorView expert_indices;  // [n, K] i32
  ConstTensorView weights;         // [n, K] or absent, at all ranks alike
  ConstTensorView scales;          // [n, S] or absent
  ConstTensorView scatter;         // [n, K] i32 or absent
};

struct World {
  int world_size = 1, local_world_size = 1, experts = 1, topk = 1;
  std::int64_t max_tokens = 0;
  bool token_major = false, enable_local_combine = false;
  std::int64_t alignment = 1;
  std::vector<RankInput> ranks;

  int nodes() const { return world_size / local_world_size; }
  int node(int rank) const { return rank / local_world_size; }
  int local(int rank) const { return rank % local_world_size; }
  std::int64_t tokens(int rank) const { return ranks[std::size_t(rank)].input.size(0); }
  int expert(int rank, std::int64_t token, int k) const {
    return ranks[std::size_t(rank)].expert_indices.at<std::int32_t>(token, k);
  }
  // The rank where the pair's expert lives; -1 where the pair is dropped.
  int home(int rank, std::int64_t token, int k) const {
    const int x = expert(rank, token, k);
    return x >= 0 && x < experts ? x / (experts / world_size) : -1;
  }
  bool goes_to(int rank, std::int64_t token, int destination) const {
    for (int k = 0; k < topk; ++k) {
      if (home(rank, token, k) == destination) return true;
    }
    return false;
  }
  bool goes_to_node(int rank, std::int64_t token, int wanted) const {
    for (int k = 0; k < topk; ++k) {
      if (const int d = home(rank, token, k); d >= 0 && node(d) == wanted) return true;
    }
    return false;
  }
};

// What stands in a row of a dispatch output.
struct Row {
  int source = -1;          // -1: padding
  std::int64_t token = -1;  // of the source
  int k = -1;               // -1: all pairs of the token on this rank (token-major)
};

inline std::int64_t count_pairs(const World& world, int source, int expert) {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < world.tokens(source); ++t) {
    for (int k = 0; k < world.topk; ++k) count += world.expert(source, t, k) == expert;
  }
  return count;
}

// Pairs per local expert, without padding.
inline std::vector<std::int64_t> expert_counts(const World& world, int rank) {
  const int per_rank = world.experts / world.world_size;
  std::vector<std::int64_t> counts;
  for (int x = rank * per_rank; x < (rank + 1) * per_rank; ++x) {
    counts.push_back(0);
    for (int s = 0; s < world.world_size; ++s) counts.back() += count_pairs(world, s, x);
  }
  return counts;
}

// Where each local expert's rows begin; token-major: the sums of the counts alone.
inline std::vector<std::int64_t> expert_offsets(const World& world, int rank) {
  const std::int64_t alignment = world.token_major ? 1 : world.alignment;
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t count : expert_counts(world, rank)) {
    offsets.push_back(offsets.back() + (count + alignment - 1) / alignment * alignment);
  }
  return offsets;
}

// The rows of every rank's output.
inline std::vector<std::vector<Row>> place(const World& world) {
  const int per_rank = world.experts / world.world_size;
  std::vector<std::vector<Row>> all;
  std::int64_t base = 0;  // of the rank's rows in the concatenation of all outputs
  for (int d = 0; d < world.world_size; ++d) {
    std::vector<Row> rows;
    if (world.token_major) {
      for (int s = 0; s < world.world_size; ++s) {
        for (std::int64_t t = 0; t < world.tokens(s); ++t) {
          if (world.goes_to(s, t, d)) rows.push_back({s, t, -1});
        }
      }
    } else {
      for (int x = d * per_rank; x < (d + 1) * per_rank; ++x) {
        for (int s = 0; s < world.world_size; ++s) {
          for (std::int64_t t = 0; t < world.tokens(s); ++t) {
            for (int k = 0; k < world.topk; ++k) {
              if (world.expert(s, t, k) == x) rows.push_back({s, t, k});
            }
          }
        }
        while (std::int64_t(rows.size()) % world.alignment != 0) rows.push_back({});
      }
    }
    if (world.ranks[0].scatter.present()) {
      std::vector<Row> moved(rows.size());
      for (const Row& row : rows) {
        const auto& scatter = world.ranks[std::size_t(row.source)].scatter;
        moved[std::size_t(scatter.at<std::int32_t>(row.token, row.k) - base)] = row;
      }
      rows = moved;
    }
    base += std::int64_t(rows.size());
    all.push_back(rows);
  }
  return all;
}

// The row of a pair in the output of its expert's rank, whose rows are given; -1: none.
inline std::int64_t row_of(const std::vector<Row>& rows, int source, std::int64_t token, int k) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].source != source || rows[i].token != token) continue;
    if (rows[i].k == k || rows[i].k == -1) return std::int64_t(i);
  }
  return -1;
}

// Element access by dtype; the bits of a value of `dtype`, rounded once.
inline float element(const ConstTensorView& view, std::int64_t row, std::int64_t column) {
  switch (view.dtype()) {
    case DType::f16:
      return float(view.at<Half>(row, column));
    case DType::bf16:
      return float(view.at<BFloat16>(row, column));
    default:
      return view.at<float>(row, column);
  }
}
inline float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return float(Half(value));
    case DType::bf16:
      return float(BFloat16(value));
    default:
      return value;
  }
}
inline void store(const TensorView& view, std::int64_t row, std::int64_t column, float value) {
  switch (view.dtype()) {
    case DType::f16:
      view.at<Half>(row, column) = Half(value);
      break;
    case DType::bf16:
      view.at<BFloat16>(row, column) = BFloat16(value);
      break;
    default:
      view.at<float>(row, column) = value;
  }
}

// `rows` rows of a dispatch output; the rows beyond those that are placed are zero.
inline Tensor gather(const World& world, const std::vector<Row>& rows,
                     ConstTensorView RankInput::* what) {
  const ConstTensorView& like = world.ranks[0].*what;
  Tensor result(like.dtype(), {std::int64_t(rows.size()), like.size(1)});
  const std::int64_t bytes = like.size(1) * size_of(like.dtype());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].source < 0 || bytes == 0) continue;
    const ConstTensorView& from = world.ranks[std::size_t(rows[i].source)].*what;
    std::memcpy(static_cast<char*>(result.data()) + std::int64_t(i) * bytes,
                static_cast<const char*>(from.data()) +
                    rows[i].token * from.stride(0) * size_of(from.dtype()),
                std::size_t(bytes));
  }
  return result;
}

// [R]: the pair's weight; token-major [R, K]: the weights of the pairs that live here, else 0.
inline Tensor gather_weights(const World& world, int rank, const std::vector<Row>& rows) {
  const DType dtype = world.ranks[0].weights.dtype();
  const std::int64_t count = std::int64_t(rows.size()),
                     columns = world.token_major ? world.topk : 1;
  Tensor table(dtype, {count, columns});
  for (std::int64_t i = 0; i < count; ++i) {
    const Row& row = rows[std::size_t(i)];
    if (row.source < 0) continue;
    const auto& weights = world.ranks[std::size_t(row.source)].weights;
    if (!world.token_major) {
      store(table.view(), i, 0, element(weights, row.token, row.k));
      continue;
    }
    for (int k = 0; k < world.topk; ++k) {
      if (world.home(row.source, row.token, k) != rank) continue;
      store(table.view(), i, k, element(weights, row.token, k));
    }
  }
  if (world.token_major) return table;
  Tensor result(dtype, {count});
  if (count > 0) std::memcpy(result.data(), table.data(), std::size_t(count * size_of(dtype)));
  return result;
}

// Token-major [R, K] i32: local expert of each pair that lives here, -1 for the others.
inline Tensor gather_expert_ids(const World& world, int rank, const std::vector<Row>& rows) {
  const int per_rank = world.experts / world.world_size;
  Tensor result(DType::i32, {std::int64_t(rows.size()), world.topk});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int k = 0; k < world.topk; ++k) {
      const bool here = world.home(rows[i].source, rows[i].token, k) == rank;
      result.view().at<std::int32_t>(i, k) =
          here ? world.expert(rows[i].source, rows[i].token, k) - rank * per_rank : -1;
    }
  }
  return result;
}

// What combine returns at `source`: the sum of the rows of each token's kept pairs.
// expert_outputs[d] is the tensor [R, H] that rank d passed. Sums are f32 and nest: pairs of a
// rank by k, ranks of a node, nodes. A partial sum is rounded to the payload type where it crosses
// a fabric: a rank's sum under local combine, unless it is the rank that reduces for this source
// (same local index), and the sum of a node that is not the source's own. The result is rounded
// once more. A product with a weight is rounded to f32 before it is added. `weights` [n, K] or
// absent; those that are given to combine are applied where the rows are reduced, so no sum of a
// rank is rounded then.
inline Tensor combine(const World& world, int source, const std::vector<std::vector<Row>>& rows,
                      std::span<const ConstTensorView> expert_outputs,
                      const ConstTensorView& weights, bool given_to_combine,
                      std::span<const ConstTensorView> biases) {
  const DType dtype = expert_outputs[0].dtype();
  const std::int64_t hidden = expert_outputs[0].size(1);
  Tensor result(dtype, {world.tokens(source), hidden});
  std::vector<std::int64_t> row(static_cast<std::size_t>(world.topk));
  for (std::int64_t t = 0; t < world.tokens(source); ++t) {
    for (int k = 0; k < world.topk; ++k) {
      const int d = world.home(source, t, k);
      row[std::size_t(k)] = d < 0 ? -1 : row_of(rows[std::size_t(d)], source, t, k);
    }
    for (std::int64_t c = 0; c < hidden; ++c) {
      float total = 0;
      for (int node = 0; node < world.nodes(); ++node) {
        float node_sum = 0;
        for (int local = 0; local < world.local_world_size; ++local) {
          const int d = node * world.local_world_size + local;
          float rank_sum = 0;
          for (int k = 0; k < world.topk; ++k) {
            if (world.home(source, t, k) != d) continue;
            float value = element(expert_outputs[std::size_t(d)], row[std::size_t(k)], c);
            if (weights.present()) {
              // Exact in double precision, so no compiler can fuse product and sum.
              value = float(double(value) * double(element(weights, t, k)));
            }
            rank_sum += value;
            if (world.token_major) break;  // one row stands for all pairs on the rank
          }
          if (world.enable_local_combine && !given_to_combine && local != world.local(source)) {
            rank_sum = rounded(rank_sum, dtype);
          }
          node_sum += rank_sum;
        }
        if (node != world.node(source)) node_sum = rounded(node_sum, dtype);
        total += node_sum;
      }
      for (const ConstTensorView& bias : biases) total += element(bias, t, c);
      store(result.view(), t, c, total);
    }
  }
  return result;
}

// [n, K]: the values of a token's pairs, as the ranks of their experts gave them: [R], token-major
// [R, K]; 0 for dropped pairs.
inline Tensor pair_values(const World& world, int source, const std::vector<std::vector<Row>>& rows,
                          std::span<const ConstTensorView> given) {
  Tensor result(given[0].dtype(), {world.tokens(source), world.topk});
  for (std::int64_t t = 0; t < world.tokens(source); ++t) {
    for (int k = 0; k < world.topk; ++k) {
      const int d = world.home(source, t, k);
      float value = 0;
      if (d >= 0) {
        const ConstTensorView& values = given[std::size_t(d)];
        const std::int64_t row = row_of(rows[std::size_t(d)], source, t, k);
        value = world.token_major ? element(values, row, k) : element(values, row, 0);
      }
      store(result.view(), t, k, value);
    }
  }
  return result;
}

// Token-major [n, K]: the values of all rows of a token added, in f32, by ranks, then nodes; what
// crosses between nodes is rounded.
inline Tensor added_values(const World& world, int source,
                           const std::vector<std::vector<Row>>& rows,
                           std::span<const ConstTensorView> given) {
  const DType dtype = given[0].dtype();
  Tensor result(dtype, {world.tokens(source), world.topk});
  for (std::int64_t t = 0; t < world.tokens(source); ++t) {
    for (int k = 0; k < world.topk; ++k) {
      float total = 0;
      for (int node = 0; node < world.nodes(); ++node) {
        float sum = 0;
        for (int local = 0; local < world.local_world_size; ++local) {
          const int d = node * world.local_world_size + local;
          if (!world.goes_to(source, t, d)) continue;
          sum += element(given[std::size_t(d)], row_of(rows[std::size_t(d)], source, t, -1), k);
        }
        total += node == world.node(source) ? sum : rounded(sum, dtype);
      }
      store(result.view(), t, k, total);
    }
  }
  return result;
}

}  // namespace winnow::expert_parallel::oracle
