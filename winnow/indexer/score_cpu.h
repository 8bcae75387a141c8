// Scores on the CPU, a block of keys at a time: the one place that forms them, so that topk and
// scores work on the same bits. Internal; compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <Eigen/Core>

#include "winnow/cpu/convert.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Keys that are scored together. Blocks begin at multiples of it and are always scored whole, so
// that the bits of a score do not depend on what is asked for.
inline constexpr std::int64_t kBlock = 256;

class Scorer {
 public:
  // Room for `queries` queries at a time.
  Scorer(const Problem& problem, std::int64_t queries)
      : q_(queries * problem.h, problem.d),
        weights_(queries, problem.h),
        keys_(Matrix::Zero(kBlock, problem.d)),
        products_(problem.h, kBlock),
        k_scale_(kBlock, 1.0f) {}

  void load_queries(const Problem& problem, std::int64_t first, std::int64_t count) {
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t h = 0; h < problem.h; ++h) {
        load_f32(problem.dtype, problem.q.data, problem.q.offset(first + n, h), problem.d,
                 q_.row(n * problem.h + h).data());
      }
      load_f32(problem.weights_dtype, problem.weights.data, problem.weights.offset(first + n),
               problem.h, weights_.row(n).data());
    }
  }

  // Where a key is, and its scale. If it is not present, its score means nothing.
  struct Key {
    const void* data = nullptr;
    std::int64_t offset = 0;  // in elements
    float scale = 1;
    bool present() const { return data != nullptr; }
  };
  // Row r of the block is key_at(r).
  template <class KeyOf>
  void load_keys_at(DType dtype, const KeyOf& key_at) {
    for (std::int64_t r = 0; r < kBlock; ++r) {
      const Key key = key_at(r);
      if (!key.present()) {
        keys_.row(r).setZero();
        continue;
      }
      load_f32(dtype, key.data, key.offset, keys_.cols(), keys_.row(r).data());
      k_scale_[static_cast<std::size_t>(r)] = key.scale;
    }
  }
  // Row r of the block is row(r) of the keys, or no key if that is negative.
  template <class Row>
  void load_keys(const Problem& problem, const Row& row) {
    load_keys_at(problem.dtype, [&](std::int64_t r) -> Key {
      const std::int64_t t = row(r);
      if (t < 0) return {};
      const bool scaled = problem.k_scale.present();
      return {problem.k.data, problem.k.offset(t),
              scaled ? problem.k_scale.data[problem.k_scale.offset(t)] : 1.0f};
    });
  }
  void load_block(const Problem& problem, std::int64_t first) {
    load_keys(problem, [&](std::int64_t r) { return first + r < problem.s_k ? first + r : -1; });
  }

  // The scores of the loaded keys for the loaded query `n`.
  void score(const Problem& problem, std::int64_t n, float (&scores)[kBlock]) {
    products_.noalias() = q_.middleRows(n * problem.h, problem.h) * keys_.transpose();
    std::fill(scores, scores + kBlock, 0.0f);
    for (std::int64_t h = 0; h < problem.h; ++h) {
      const float weight = weights_(n, h);
      const float* const dots = products_.row(h).data();
      for (std::int64_t r = 0; r < kBlock; ++r) {
        const float dot = dots[r] <= 0.0f ? 0.0f : dots[r];  // NaN stays
        scores[r] += weight * dot;
      }
    }
    // Adding 0 makes -0 a 0; every NaN becomes the same one.
    for (std::int64_t r = 0; r < kBlock; ++r) {
      const float score = scores[r] * k_scale_[static_cast<std::size_t>(r)] + 0.0f;
      scores[r] = score == score ? score : std::numeric_limits<float>::quiet_NaN();
    }
  }

 private:
  Matrix q_, weights_, keys_, products_;
  std::vector<float> k_scale_;
};

}  // namespace winnow::indexer
