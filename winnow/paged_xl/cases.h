// The decode steps on which the operations on a paged cache are tested, verified and timed, with
// the one table of tolerances. Shared by attention, append and position_term.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/position_term/position_term.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::paged_xl {

using testing::Layout;
using testing::StridedTensor;

enum class Mode { plain, fused };     // with matrix_bd; with pos_bias_v and r
enum class Mask { none, some, all };  // -inf in matrix_bd

struct StepCase {
  std::string name;
  DType dtype = DType::f32;
  Mode mode = Mode::plain;
  std::int64_t num_heads = 4, num_kv_heads = 2, head_size = 64, block_size = 16;
  std::vector<std::int32_t> context_lens = {1, 37, 0, 16};
  std::int64_t spare = 9;  // columns, distances and a few blocks beyond what the step needs
  DType matrix_bd_dtype = DType::f32;
  bool bias_per_sequence = false;
  bool shared_blocks = false;  // all sequences share the blocks of the longest
  Layout layout = Layout::dense;
  Mask mask = Mask::none;
  std::optional<double> scale{};
  double query = 1;  // standard deviation

  // As matrix_bd_dtype says, but f64 with f64.
  DType dtype_of_matrix_bd() const { return dtype == DType::f64 ? DType::f64 : matrix_bd_dtype; }
};

// "num_seqs 4, num_heads 4, num_kv_heads 2, head_size 64, block_size 16, context 0 to 37".
std::string describe(const StepCase& shape);

// Appends the case once per dtype and mode: "bf16-fused-" and its name.
void add(std::vector<StepCase>& list, std::initializer_list<DType> dtypes,
         std::initializer_list<Mode> modes, const StepCase& shape);

// testing::make_tensor with gaps of one element: the operations want no more than natural
// alignment.
StridedTensor make_unaligned(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                             int dense = 1);

// All inputs of one step. Blocks are in random order; unused slots and blocks are NaN, entries of
// the block table past the last needed block are no block at all.
struct Step {
  StridedTensor query, key_cache, value_cache, pos_bias_u, pos_bias_v, matrix_bd, r;
  Tensor block_tables, context_lens;
  std::optional<double> scale;
  Mode mode = Mode::plain;

  Step on(Device device) const;
  AttentionArgs attention_args() const;         // without outputs
  PositionTermArgs position_term_args() const;  // without matrix_bd
};
Step make_step(const StepCase& shape);

// The tolerance table. `dtype` is that of the tensor, `largest_logit` that of the case.
enum class Quantity { out, lse, matrix_bd };
testing::Tolerance tolerance(Quantity quantity, DType dtype, double largest_logit);

// A benchmark of `bytes` useful bytes. The ceiling copies as many on the CPU, and on a GPU so many
// that its rate is that of the memory.
testing::Benchmark make_copy_benchmark(std::string name, std::string shape, double bytes,
                                       DeviceType device = DeviceType::cpu);

// The lengths of the ragged batch of the benchmarks: 256 sequences of 1 to 16,384 tokens.
std::vector<std::int32_t> ragged_contexts();

// Random numbers without the time to make each of them: a pattern that repeats, in step with no
// block. Any device.
void fill_pattern(Tensor& tensor);

}  // namespace winnow::paged_xl
