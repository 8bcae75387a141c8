// Where the numbers of the example live and how they are worked on. The model needs two things of a
// machine besides Winnow itself: matrix products, and small operations on the rows of matrices.
// Both are written once here; host.cc runs them on the CPU and cuda.cu on a GPU.
#pragma once

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

// KL(teacher || softmax of the scores) over the entries that have a score; the others are -inf. The
// teacher's rows need not sum to 1. d_scores gets `scale` times the gradient, 0 for an entry
// without a score.
struct IndexerLoss {
  const float* scores;   // [tokens, columns]
  const float* teacher;  // [tokens, columns]
  float* d_scores;       // [tokens, columns]
  float* losses;         // [tokens]
  std::int64_t columns;
  float scale;
  ON_BOTH void operator()(std::int64_t t, Lane lane) const {
    const std::int64_t begin = t * columns + lane.index, end = (t + 1) * columns;
    float largest = -INFINITY, sum = 0, teacher_sum = 0, loss = 0;
    for (std::int64_t j = begin; j < end; j += lane.count) {
      largest = fmaxf(largest, scores[j]);
      teacher_sum += teacher[j];
    }
    largest = lane.max(largest);  // finite: every token sees itself
    teacher_sum = lane.sum(teacher_sum);
    for (std::int64_t j = begin; j < end; j += lane.count) sum += expf(scores[j] - largest);
    sum = lane.sum(sum);
    for (std::int64_t j = begin; j < end; j += lane.count) {
      const float wanted = teacher[j] / teacher_sum;
      const float log_guess = scores[j] - largest - logf(sum);
      if (wanted > 0) loss += wanted * (logf(wanted) - log_guess);
      d_scores[j] = scale * (expf(log_guess) - wanted);
    }
    losses[t] = lane.sum(loss);
  }
};

struct Scale {
  float* data;  // [rows, columns]
  std::int64_t columns;
  float factor;
  ON_BOTH void operator()(std::int64_t row, Lane lane) const {
    for (std::int64_t c = lane.index; c < columns; c += lane.count) {
      data[row * columns + c] *= factor;
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
using RowOperation = std::variant<OneHot, Rotate, Narrow, Widen, Copy, CrossEntropy, IndexerLoss,
                                  Scale, SumRow, AdamUpdate>;

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
