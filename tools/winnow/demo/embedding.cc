// Turns bytes into the queries and the latent rows of an MLA layer by fixed seeded projections.

#include <array>
#include <cmath>
#include <vector>

#include "tools/winnow/demo/layer.h"

namespace winnow::demo {
namespace {

constexpr std::uint64_t kSeed = 20240229;
constexpr double kRopeBase = 10000.0;
constexpr std::int64_t kRopePairs = kRopeDim / 2;
constexpr int kByteValues = 256;
// How strongly a row shows the byte 0, 1, 2, 3 places before it.
constexpr std::array<double, kContext> kKeyStrength = {1.0, 1.0, 0.9, 0.7};

// The byte `mine` places before the query asks for rows whose byte `theirs` places before them is
// the same; a match adds `gain` to the logit.
struct Question {
  int mine;
  int theirs;
  double gain;
};

struct Head {
  std::vector<Question> questions;
  double recency;  // what the logit gains at distance 0; about a quarter less at ten times as far
};

Head make_head(std::int64_t head) {
  const double variant = static_cast<double>(head % 4);
  switch (head / 4) {
    case 0:  // nearby
      return {{{0, 0, 1.0}}, 8.0 + 2.0 * variant};
    case 1:  // after
      return {{{0, 1, 5.0 + 0.4 * variant}}, 2.0 + variant};
    case 2:  // after two
      return {{{0, 1, 3.2 + 0.3 * variant}, {1, 2, 3.2}}, 1.5 + variant};
    default:  // alike
      return {{{0, 0, 2.2}, {1, 1, 2.2 + 0.3 * variant}, {2, 2, 1.8}}, 1.0 + variant};
  }
}

// direction(offset, byte): a random unit vector; all of them are nearly orthogonal.
class ByteDirections {
 public:
  ByteDirections() : values_(kContext * kByteValues * kNopeDim) {
    Random random(kSeed);
    for (std::int64_t start = 0; start < std::int64_t(values_.size()); start += kNopeDim) {
      double norm = 0;
      for (std::int64_t c = 0; c < kNopeDim; ++c) {
        const double value = random.normal();
        values_[start + c] = static_cast<float>(value);
        norm += value * value;
      }
      for (std::int64_t c = 0; c < kNopeDim; ++c) {
        values_[start + c] /= static_cast<float>(std::sqrt(norm));
      }
    }
  }
  const float* direction(int offset, char byte) const {
    const int value = static_cast<unsigned char>(byte);
    return values_.data() + (offset * kByteValues + value) * kNopeDim;
  }

 private:
  std::vector<float> values_;
};

// Unit vectors whose inner product depends on the distance of the two positions alone: it falls
// from 1 about evenly with the logarithm of the distance.
void add_position(std::int64_t position, double strength, float* columns) {
  for (std::int64_t pair = 0; pair < kRopePairs; ++pair) {
    const double rate = std::pow(kRopeBase, -double(pair) / double(kRopePairs));
    const double angle = static_cast<double>(position) * rate;
    const double length = strength / std::sqrt(static_cast<double>(kRopePairs));
    columns[2 * pair] += static_cast<float>(length * std::cos(angle));
    columns[2 * pair + 1] += static_cast<float>(length * std::sin(angle));
  }
}

void add_scaled(const float* from, double factor, float* to) {
  for (std::int64_t c = 0; c < kNopeDim; ++c) to[c] += static_cast<float>(factor) * from[c];
}

}  // namespace

Embedding embed(std::string_view text) {
  const std::int64_t tokens = static_cast<std::int64_t>(text.size());
  Embedding result = {Tensor(DType::f32, {tokens, kHeads, kRowDim}),
                      Tensor(DType::f32, {tokens, 1, kRowDim})};
  const ByteDirections directions;
  std::vector<Head> heads;
  for (std::int64_t h = 0; h < kHeads; ++h) heads.push_back(make_head(h));
  // The operation divides by sqrt(d_qk); the strengths above are meant after that.
  const double undo_scale = std::sqrt(static_cast<double>(kRowDim));

  float* row = result.kv.values<float>().data();
  float* query = result.q.values<float>().data();
  for (std::int64_t t = 0; t < tokens; ++t, row += kRowDim) {
    for (int offset = 0; offset < kContext && offset <= t; ++offset) {
      add_scaled(directions.direction(offset, text[t - offset]), kKeyStrength[offset], row);
    }
    add_position(t, 1.0, row + kNopeDim);
    for (const Head& head : heads) {
      for (const Question& question : head.questions) {
        if (question.mine > t) continue;
        add_scaled(directions.direction(question.theirs, text[t - question.mine]),
                   undo_scale * question.gain / kKeyStrength[question.theirs], query);
      }
      add_position(t, undo_scale * head.recency, query + kNopeDim);
      query += kRowDim;
    }
  }
  return result;
}

}  // namespace winnow::demo
