// What the compressor's operations share: their sizes, what becomes of a row once it is summed, and
// the packed sequences. Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/dtype.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow {
class Check;
}  // namespace winnow

namespace winnow::compressor {

inline constexpr std::int64_t kMostColumns = 512, kMostRatio = 128;
inline constexpr double kUsualEps = 1e-6;

// A packed sequence, and the position of its first token.
struct Sequence {
  std::int64_t token = 0, tokens = 0;
  std::int64_t row = 0, rows = 0;
  std::int64_t position = 0;
  std::int64_t state = -1;  // of step()
};

struct Problem {
  DType dtype = DType::f32;  // of kv and gate
  std::int64_t tokens = 0, ratio = 1, d = 0;
  bool overlap = false;
  Rows<const void*> kv, gate;  // [tokens, series() * d]
  // Of accumulator_of(dtype), as all that follows.
  Rows<const void*> position_bias;    // [ratio, series() * d]
  const void* norm_weight = nullptr;  // [d]; null: no norm
  double eps = kUsualEps;
  Rows<const void*> cos, sin;  // [positions, pairs]; null: no rotation
  std::int64_t positions = 0;
  std::int64_t pairs = 0;  // the columns that are rotated are the last 2 * pairs
  bool hadamard = false;

  std::int64_t series() const { return overlap ? 2 : 1; }
  std::int64_t slots() const { return series() * ratio; }  // of a window
};

template <class Args>
Problem problem_of(const Args& args) {
  Problem problem;
  problem.dtype = args.kv.dtype();
  problem.tokens = args.kv.size(0);
  problem.ratio = args.position_bias.size(0);
  problem.overlap = args.overlap;
  problem.d = args.kv.size(1) / problem.series();
  problem.kv = rows_of<const void*>(args.kv, 0);
  problem.gate = rows_of<const void*>(args.gate, 0);
  problem.position_bias = rows_of<const void*>(args.position_bias, 0);
  if (args.norm_weight.present()) problem.norm_weight = args.norm_weight.data();
  problem.eps = args.eps.value_or(kUsualEps);
  problem.cos = rows_of<const void*>(args.cos, 0);
  problem.sin = rows_of<const void*>(args.sin, 0);
  if (args.cos.present()) {
    problem.positions = args.cos.size(0);
    problem.pairs = args.cos.size(1);
  }
  problem.hadamard = args.hadamard;
  return problem;
}

// The columns of kv are one or two series of d, a multiple of 8 up to 512.
void check_columns(const Check& check, const ConstTensorView& kv, bool overlap);
// The ratio, and that there is a number more than sequences.
void check_sizes(const Check& check, const ConstTensorView& position_bias,
                 const ConstTensorView& cu_seqlens);
// The columns of rows, or of their gradient.
void check_row_columns(const Check& check, std::string_view argument, const ConstTensorView& rows,
                       const ConstTensorView& kv, bool overlap);
// What becomes of a row: eps, the rotation, and the transform.
struct Finish {
  ConstTensorView kv, norm_weight, cos, sin;
  std::optional<double> eps;
  std::int64_t d;
  bool hadamard;
};
void check_finish(const Check& check, const Finish& finish);

// What says where the sequences are.
struct Packed {
  ConstTensorView cu_seqlens, cu_rows, first_position;  // the last two may be absent
  std::int64_t tokens = 0, ratio = 1;
};

// The sequences, read once and checked: cu_seqlens from 0 up to `tokens`, cu_rows by
// floor(length / ratio). Without cu_rows, sequences have no rows here.
std::vector<Sequence> read_sequences(std::string_view operation, const Packed& packed,
                                     const RunOptions& options);
// What the kernels of GPUs want besides.
void check_for_cuda(const Check& check, const ConstTensorView& kv, std::int64_t rows);
// As many rows as the sequences have, and rows of cos for the positions of their windows.
void check_rows(const Check& check, std::span<const Sequence> sequences, std::int64_t ratio,
                std::string_view argument, std::int64_t rows, const ConstTensorView& cos);
// That cos has a row for the position of a window of sequence i.
void check_position(const Check& check, const ConstTensorView& cos, std::int64_t position,
                    std::size_t i);

}  // namespace winnow::compressor
