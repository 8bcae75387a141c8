// Where the numbers of the example live and how they are worked on. The model needs two things of a
// machine besides Winnow itself: matrix products, and small operations on the rows of matrices.
// Both are written once here; host.cc runs them on the CPU and cuda.cu on a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <variant>

#include <winnow/winnow.h>

#ifdef __CUDACC__
#define ON_BOTH __host__ __device__
#else
#define ON_BOTH
#endif

// One of the `count` workers that share a row: the lanes of a warp on a GPU, a single one on the
// CPU. After a sum or a maximum all of them see what any of them had written.
struct Lane {
  int index = 0, count = 1;

  template <class T>
  ON_BOTH T sum(T x) const {
#ifdef __CUDA_ARCH__
    __syncwarp();
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
#endif
    return x;
  }
  ON_BOTH float max(float x) const {
#ifdef __CUDA_ARCH__
    __syncwarp();
    for (int distance = 16; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    }
#endif
    return x;
  }
  // How many workers before this one bring a flag.
  ON_BOTH int rank([[maybe_unused]] bool flag) const {
#ifdef __CUDA_ARCH__
    return __popc(__ballot_sync(~0u, flag) & ((1u << index) - 1));
#else
    return 0;
#endif
  }
};

inline constexpr std::int64_t kBytes = 256;  // the vocabulary

// The row operations. All matrices are dense; t is the row, which mostly is the token.

// out[t, 256 * k + b] = 1 where byte b stands k places before token t.
struct OneHot {
  const std::uint8_t* text;
  float* out;
  std::int64_t context;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    for (std::int64_t c = lane.index; c < context * kBytes; c += lane.count) {
      const std::int64_t back = c / kBytes;
      out[t * context * kBytes + c] = t >= back && text[t - back] == c % kBytes ? 1.0f : 0.0f;
    }
  }
};

// Rotary positions on the last `rotated` columns of every vector of row t; direction -1 undoes it.
struct Rotate {
  float* data;  // [rows, vectors, columns]
  std::int64_t vectors, columns, rotated;
  float direction;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    const std::int64_t pairs = rotated / 2;
    for (std::int64_t i = lane.index; i < vectors * pairs; i += lane.count) {
      const std::int64_t vector = i / pairs, k = i % pairs;
      const float rate = powf(10000.0f, -static_cast<float>(k) / static_cast<float>(pairs));
      const float angle = direction * static_cast<float>(t) * rate;
      float* pair = data + (t * vectors + vector) * columns + columns - rotated + 2 * k;
      const float a = pair[0], b = pair[1], cosine = cosf(angle), sine = sinf(angle);
      pair[0] = a * cosine - b * sine;
      pair[1] = a * sine + b * cosine;
    }
  }
};

template <class From, class To>
struct Convert {
  const From* from;
  To* to;
  std::int64_t columns;
  ON_BOTH void operator()(std::int64_t row, Lane lane) const {
    for (std::int64_t c = lane.index; c < columns; c += lane.count) {
      to[row * columns + c] = static_cast<To>(static_cast<float>(from[row * columns + c]));
    }
  }
};

// The loss of predicting the next byte; the logits become `scale` times their gradient.
struct CrossEntropy {
  const std::uint8_t* text;
  float* logits;  // [tokens, 256]
  float* losses;  // [tokens]
  float scale;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    float* row = logits + t * kBytes;
    const std::int64_t next = text[t + 1];
    const float wanted = row[next];
    float largest = -INFINITY, sum = 0;
    for (int b = lane.index; b < kBytes; b += lane.count) largest = fmaxf(largest, row[b]);
    largest = lane.max(largest);
    for (int b = lane.index; b < kBytes; b += lane.count) sum += expf(row[b] - largest);
    sum = lane.sum(sum);
    losses[t] = logf(sum) + largest - wanted;
    for (int b = lane.index; b < kBytes; b += lane.count) {
      row[b] = scale * (expf(row[b] - largest) / sum - (b == next ? 1.0f : 0.0f));
    }
  }
};

// scores[t, s] = scale * sum_j weights[t, j] * relu(products[t, j, s]) for the tokens s up to t.
struct IndexerScores {
  const float* products;  // [tokens, heads, tokens]
  const float* weights;   // [tokens, heads]
  float* scores;          // [tokens, tokens]
  std::int64_t tokens, heads;
  float scale;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    for (std::int64_t s = lane.index; s <= t; s += lane.count) {
      float score = 0;
      for (std::int64_t j = t * heads; j < (t + 1) * heads; ++j) {
        score += weights[j] * fmaxf(products[j * tokens + s], 0);
      }
      scores[t * tokens + s] = scale * score;
    }
  }
};

// The topk tokens up to t with the highest scores, the earlier ones of equals, in their order; -1
// where there are fewer.
struct ChooseBest {
  const float* scores;    // [tokens, tokens]
  std::int32_t* indices;  // [tokens, topk]
  std::int64_t tokens, topk;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    // The topk-th largest key, bit by bit from above; 0, below all keys, if all are chosen.
    std::uint32_t threshold = 0;
    for (std::uint32_t bit = 1u << 31; bit != 0; bit /= 2) {
      int count = 0;
      for (std::int64_t s = lane.index; s <= t; s += lane.count) {
        count += key(t, s) >= (threshold | bit);
      }
      if (lane.sum(count) >= topk) threshold |= bit;
    }
    int above = 0;
    for (std::int64_t s = lane.index; s <= t; s += lane.count) above += key(t, s) > threshold;
    std::int64_t equals_left = topk - lane.sum(above), chosen = 0;
    for (std::int64_t begin = 0; begin <= t; begin += lane.count) {
      const std::int64_t s = begin + lane.index;
      const bool equal = s <= t && key(t, s) == threshold;
      const int equals_before = lane.rank(equal);
      const bool take = s <= t && (key(t, s) > threshold || (equal && equals_before < equals_left));
      const std::int64_t place = chosen + lane.rank(take);
      if (take) indices[t * topk + place] = static_cast<std::int32_t>(s);
      equals_left -= lane.sum(static_cast<int>(equal));
      chosen += lane.sum(static_cast<int>(take));
    }
    for (std::int64_t j = chosen + lane.index; j < topk; j += lane.count)
      indices[t * topk + j] = -1;
  }
  // Orders as the scores do, and is never 0.
  ON_BOTH std::uint32_t key(std::int64_t t, std::int64_t s) const {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(scores[t * tokens + s]);
    return bits >> 31 ? ~bits : bits | 1u << 31;
  }
};

// KL(teacher || softmax of the scores) over the chosen tokens. The teacher's rows need not sum to
// 1. d_scores gets `scale` times the gradient, 0 where nothing was chosen.
struct IndexerLoss {
  const float* scores;          // [tokens, tokens]
  const std::int32_t* indices;  // [tokens, topk]
  const float* teacher;         // [tokens, topk]
  float* d_scores;              // [tokens, tokens]
  float* losses;                // [tokens]
  std::int64_t tokens, topk;
  float scale;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    const float* x = scores + t * tokens;
    float largest = -INFINITY, sum = 0, teacher_sum = 0, loss = 0;
    for (std::int64_t s = lane.index; s < tokens; s += lane.count) d_scores[t * tokens + s] = 0;
    for (std::int64_t j = t * topk + lane.index; j < (t + 1) * topk; j += lane.count) {
      if (!visible(j, t)) continue;
      largest = fmaxf(largest, x[indices[j]]);
      teacher_sum += teacher[j];
    }
    largest = lane.max(largest);
    teacher_sum = lane.sum(teacher_sum);
    for (std::int64_t j = t * topk + lane.index; j < (t + 1) * topk; j += lane.count) {
      if (visible(j, t)) sum += expf(x[indices[j]] - largest);
    }
    sum = lane.sum(sum);
    for (std::int64_t j = t * topk + lane.index; j < (t + 1) * topk; j += lane.count) {
      if (!visible(j, t)) continue;
      const float wanted = teacher[j] / teacher_sum,
                  log_guess = x[indices[j]] - largest - logf(sum);
      if (wanted > 0) loss += wanted * (logf(wanted) - log_guess);
      d_scores[t * tokens + indices[j]] = scale * (expf(log_guess) - wanted);
    }
    losses[t] = lane.sum(loss);
  }
  ON_BOTH bool visible(std::int64_t j, std::int64_t t) const {
    return indices[j] >= 0 && indices[j] <= t;
  }
};

// The way back through IndexerScores; the products become their gradient.
struct IndexerGradient {
  const float* d_scores;  // [tokens, tokens]
  const float* weights;   // [tokens, heads]
  float* products;        // [tokens, heads, tokens]
  float* d_weights;       // [tokens, heads]
  std::int64_t tokens, heads;
  float scale;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    for (std::int64_t j = t * heads; j < (t + 1) * heads; ++j) {
      float d_weight = 0;
      for (std::int64_t s = lane.index; s < tokens; s += lane.count) {
        const float product = products[j * tokens + s];
        const float gradient = s <= t && product > 0 ? scale * d_scores[t * tokens + s] : 0;
        d_weight += gradient * product;
        products[j * tokens + s] = gradient * weights[j];
      }
      d_weights[j] = lane.sum(d_weight);
    }
  }
};

struct SumRow {
  const float* values;
  float* sums;
  std::int64_t columns;
  ON_BOTH void operator()(std::int64_t row, Lane lane) const {
    float sum = 0;
    for (std::int64_t c = lane.index; c < columns; c += lane.count)
      sum += values[row * columns + c];
    sums[row] = lane.sum(sum);
  }
};

// Adam; both corrections are 1 / (1 - decay^step).
struct AdamUpdate {
  float *value, *mean, *square;
  const float* gradient;
  std::int64_t columns;
  float rate, mean_correction, square_correction;
  static constexpr float kMeanDecay = 0.9f, kSquareDecay = 0.99f, kTiny = 1e-10f;
  ON_BOTH void operator()(std::int64_t row, Lane lane) const {
    for (std::int64_t c = row * columns + lane.index; c < (row + 1) * columns; c += lane.count) {
      mean[c] += (1 - kMeanDecay) * (gradient[c] - mean[c]);
      square[c] += (1 - kSquareDecay) * (gradient[c] * gradient[c] - square[c]);
      value[c] -= rate * mean_correction * mean[c] / (sqrtf(square_correction * square[c]) + kTiny);
    }
  }
};

using Narrow = Convert<float, winnow::BFloat16>;
using Widen = Convert<winnow::BFloat16, float>;
using Copy = Convert<float, float>;
using RowOperation = std::variant<OneHot, Rotate, Narrow, Widen, Copy, CrossEntropy, IndexerScores,
                                  ChooseBest, IndexerLoss, IndexerGradient, SumRow, AdamUpdate>;

class Machine {
 public:
  virtual ~Machine() = default;
  virtual winnow::Device device() const = 0;
  // c = a b, or c += a b: f32 matrices, dense or transposed views of dense ones (c dense).
  virtual void multiply(const winnow::ConstTensorView& a, const winnow::ConstTensorView& b,
                        const winnow::TensorView& c, bool add = false) = 0;
  virtual void for_each_row(std::int64_t rows, const RowOperation& operation) = 0;
  virtual void wait() = 0;  // until all work is done
};

std::unique_ptr<Machine> make_host_machine();
std::unique_ptr<Machine> make_cuda_machine();  // only in builds with CUDA
