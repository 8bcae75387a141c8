// The problems on which the compressor's operations are tested, verified and timed, with the table
// of tolerances.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::compressor {

using testing::Layout;
using testing::StridedTensor;

enum class Gates {
  ordinary,
  far,        // hundreds apart
  equal,      // all 0, and no bias
  minus_inf,  // some are -inf
  nan,        // some are NaN, -inf throughout a window, or +inf
};

struct CaseShape {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> lengths = {23, 0, 3, 8, 41};  // of the sequences
  std::int64_t ratio = 4, d = 64;
  bool overlap = true, norm = false, hadamard = false, positions = false;
  std::int64_t pairs = 0;
  bool wide = false;  // rows, and the gradients of kv and gate, are in the dtype of the sums
  Gates gates = Gates::ordinary;
  Layout layout = Layout::dense;
  bool poison = true;  // tokens of no window are NaN

  std::int64_t columns() const { return overlap ? 2 * d : d; }
  std::int64_t tokens() const;
  std::int64_t rows() const;
  DType rows_dtype() const { return wide ? accumulator_of(dtype) : dtype; }
};

// The case table. Names are unique.
const std::vector<CaseShape>& case_shapes();

// "tokens 75, sequences 5, ratio 4, d 64".
std::string describe(const CaseShape& shape);

// The same for the same shape on every platform.
struct CaseInputs {
  StridedTensor kv, gate, position_bias, cu_seqlens, cu_rows;
  StridedTensor norm_weight, cos, sin, first_position;  // may be absent
  bool overlap = false, hadamard = false;

  // A copy on that device.
  CaseInputs on(Device device) const;
  // What the argument structs have in common.
  template <class Args>
  void pass_to(Args& args) const {
    args.kv = kv.view;
    args.gate = gate.view;
    args.position_bias = position_bias.view;
    args.cu_seqlens = cu_seqlens.view;
    if constexpr (requires { args.cu_rows; }) args.cu_rows = cu_rows.view;
    args.overlap = overlap;
    args.norm_weight = norm_weight.view;
    args.cos = cos.view;
    args.sin = sin.view;
    args.first_position = first_position.view;
    args.hadamard = hadamard;
  }
};
CaseInputs make_inputs(const CaseShape& shape);

// What forward() makes of inputs, and backward() gets. Absent without a norm.
struct CaseRows {
  StridedTensor rows, rstd;

  template <class Args>
  void pass_to(Args& args) const {
    args.rows = rows.view;
    args.rstd = rstd.view;
  }
};
// On the device of the inputs.
CaseRows make_rows(const CaseShape& shape, const CaseInputs& inputs,
                   const RunOptions& options = {});

// The tolerance table.
testing::Tolerance rows_tolerance(DType rows);
testing::Tolerance gradient_tolerance(DType narrowest);
// Of d_position_bias, which the rounding of rows enters through the norm.
testing::Tolerance bias_gradient_tolerance(const CaseShape& shape);

// A problem that is timed: DeepSeek-V4's, with norm and rotation.
struct BenchShape : CaseShape {
  DeviceType device = DeviceType::cpu;
};
std::vector<BenchShape> bench_shapes();
// Name, shape, useful bytes, and a copy of as many as ceiling; `prepare` is left to the operation.
testing::Benchmark make_benchmark(const BenchShape& shape, double bytes);

}  // namespace winnow::compressor
