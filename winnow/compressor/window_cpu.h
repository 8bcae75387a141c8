// One window on the CPU: its sum, and the row that is made of it. Shared by the operations, so that
// they give bitwise the same rows. Internal; compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <Eigen/Core>

#include "winnow/compressor/problem.h"

namespace winnow::compressor {

// The first slot in use of window w. With overlap, the first window of a sequence has no window
// before it, so that the slots below this one hold nothing.
inline std::int64_t first_slot(const Problem& problem, std::int64_t w) {
  return problem.overlap && w == 0 ? problem.ratio : 0;
}

// The sequence of a compressed row.
inline auto sequence_of(std::span<const Sequence> sequences, std::int64_t row) {
  return std::ranges::upper_bound(sequences, row, {},
                                  [](const Sequence& s) { return s.row + s.rows; });
}

// The working memory of one thread. Real is float, or double where the problem is in f64.
template <class Real>
class Window {
 public:
  using Row = Eigen::Array<Real, 1, Eigen::Dynamic, Eigen::RowMajor>;
  using Slots = Eigen::Array<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  explicit Window(const Problem& problem);

  // Fills the slots of window `w` of the sequence from kv and gate, except those below
  // first_slot().
  void load(const Sequence& sequence, std::int64_t w);
  // One slot: kv and the gate, with its position bias, of one token.
  Real* kv(std::int64_t slot) { return kv_.row(slot).data(); }
  Real* gate(std::int64_t slot) { return gate_.row(slot).data(); }
  // Loads columns [first, first + count) of a token's kv, and of its gate plus the position bias of
  // `place`, the token's index in its window (0 to ratio - 1).
  void load_token(std::int64_t token, std::int64_t place, std::int64_t first, std::int64_t count,
                  Real* kv, Real* gate) const;
  // The sum over the slots from `first` on.
  void sum(std::int64_t first);
  // Returns the finished row: the sum after the norm, rotation and Hadamard transform that the
  // problem has. `position` is that of the window's first own token.
  const Row& finish(std::int64_t position);

  // 1 / sqrt(mean(sum^2) + eps)
  Real rstd() const;

  // After sum(): `gradient` is that of finish()'s result on entry and that of the sum on return.
  // Where there is a norm, `row` and `rstd` are those of the window, and this adds to
  // d_norm_weight.
  void finish_backward(std::int64_t position, const Row& row, Real rstd, Row& gradient,
                       Row& d_norm_weight) const;
  // After finish_backward(): overwrites kv and gate of each slot with their gradients.
  void sum_backward(const Row& gradient);

 private:
  Eigen::Map<const Row> norm_weight() const {
    return {static_cast<const Real*>(problem_.norm_weight), problem_.d};
  }
  void rotate(std::int64_t position, Real sign, Row& row) const;
  void transform(Row& row) const;

  const Problem& problem_;
  Slots kv_, gate_;  // [slots, d]; after sum() `gate_` holds exp(gate - largest_)
  Row largest_, total_, sum_, result_;  // total_: the sum of these exponentials
  std::int64_t first_ = 0;
};

}  // namespace winnow::compressor
