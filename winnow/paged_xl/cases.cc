#include "winnow/paged_xl/cases.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"

namespace winnow::paged_xl {
namespace {

using winnow::testing::Random;
using winnow::testing::RelativeTo;
using winnow::testing::Tolerance;

std::int64_t blocks_for(const StepCase& shape, std::int64_t tokens) {
  return (tokens + shape.block_size - 1) / shape.block_size;
}

std::int64_t longest(const StepCase& shape) {
  std::int64_t tokens = 0;
  for (const std::int32_t length : shape.context_lens)
    tokens = std::max<std::int64_t>(tokens, length);
  return tokens;
}

// Gives every sequence its blocks, out of order, and returns how many blocks the cache has.
std::int64_t fill_block_tables(const StepCase& shape, const TensorView& tables, Random& random) {
  const auto num_seqs = static_cast<std::int64_t>(shape.context_lens.size());
  std::int64_t needed = 0;
  for (const std::int32_t length : shape.context_lens) needed += blocks_for(shape, length);
  if (shape.shared_blocks) needed = blocks_for(shape, longest(shape));
  std::vector<std::int32_t> free(static_cast<std::size_t>(needed + shape.spare));
  std::iota(free.begin(), free.end(), 0);
  testing::shuffle(std::span(free), random);
  std::size_t next = 0;
  for (std::int64_t s = 0; s < num_seqs; ++s) {
    if (shape.shared_blocks) next = 0;
    const std::int64_t used = blocks_for(shape, shape.context_lens[static_cast<std::size_t>(s)]);
    for (std::int64_t b = 0; b < tables.size(1); ++b) {
      tables.at<std::int32_t>(s, b) = b < used     ? free[next++]
                                      : b % 2 == 0 ? std::numeric_limits<std::int32_t>::max()
                                                   : -1;
    }
  }
  return static_cast<std::int64_t>(free.size());
}

// Numbers in the slots that some sequence uses; the others keep their NaN.
void fill_caches(const StepCase& shape, const Step& step, Random& random) {
  const TensorView& keys = step.key_cache.view;
  const TensorView& values = step.value_cache.view;
  for (std::size_t s = 0; s < shape.context_lens.size(); ++s) {
    for (std::int64_t first = 0; first < shape.context_lens[s]; first += shape.block_size) {
      const std::int64_t used = std::min(shape.block_size, shape.context_lens[s] - first);
      const std::int64_t block = step.block_tables.view().at<std::int32_t>(
          static_cast<std::int64_t>(s), first / shape.block_size);
      testing::fill_normal(keys.slice(0, block, block + 1).slice(3, 0, used), random);
      testing::fill_normal(values.slice(0, block, block + 1).slice(3, 0, used), random);
    }
  }
}

// The columns of each context; those beyond keep their NaN.
void fill_matrix_bd(const StepCase& shape, const TensorView& matrix_bd, Random& random) {
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  for (std::size_t s = 0; s < shape.context_lens.size(); ++s) {
    const auto seq = static_cast<std::int64_t>(s);
    const std::int64_t length = shape.context_lens[s];
    const TensorView row = matrix_bd.slice(0, seq, seq + 1).slice(2, 0, length);
    testing::fill_normal(row, random, 4);
    if (shape.mask == Mask::some) testing::fill(row.slice(2, 0, length / 2), minus_infinity);
    if (shape.mask == Mask::all) testing::fill(row, minus_infinity);
  }
}

}  // namespace

std::string describe(const StepCase& shape) {
  const auto [least, most] =
      std::minmax_element(shape.context_lens.begin(), shape.context_lens.end());
  std::string context = "none";
  if (!shape.context_lens.empty()) {
    context = *least == *most ? std::to_string(*most)
                              : std::to_string(*least) + " to " + std::to_string(*most);
  }
  return "num_seqs " + std::to_string(shape.context_lens.size()) + ", num_heads " +
         std::to_string(shape.num_heads) + ", num_kv_heads " + std::to_string(shape.num_kv_heads) +
         ", head_size " + std::to_string(shape.head_size) + ", block_size " +
         std::to_string(shape.block_size) + ", context " + context;
}

void add(std::vector<StepCase>& list, std::initializer_list<DType> dtypes,
         std::initializer_list<Mode> modes, const StepCase& shape) {
  for (const Mode mode : modes) {
    StepCase next = shape;
    next.mode = mode;
    next.name = (mode == Mode::plain ? "plain-" : "fused-") + shape.name;
    testing::add(list, dtypes, next);
  }
}

StridedTensor make_unaligned(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                             int dense) {
  return testing::make_tensor(dtype, shape, layout, {.dense = dense, .length = 1});
}

Step Step::on(Device device) const {
  Step copy;
  copy.query = testing::on(device, query);
  copy.key_cache = testing::on(device, key_cache);
  copy.value_cache = testing::on(device, value_cache);
  copy.pos_bias_u = testing::on(device, pos_bias_u);
  copy.pos_bias_v = testing::on(device, pos_bias_v);
  copy.matrix_bd = testing::on(device, matrix_bd);
  copy.r = testing::on(device, r);
  copy.block_tables = block_tables.to(device);
  copy.context_lens = context_lens.to(device);
  copy.scale = scale;
  copy.mode = mode;
  return copy;
}

AttentionArgs Step::attention_args() const {
  AttentionArgs args;
  args.query = query.view;
  args.key_cache = key_cache.view;
  args.value_cache = value_cache.view;
  args.pos_bias_u = pos_bias_u.view;
  if (mode == Mode::plain) {
    args.matrix_bd = matrix_bd.view;
  } else {
    args.pos_bias_v = pos_bias_v.view;
    args.r = r.view;
  }
  args.block_tables = block_tables;
  args.context_lens = context_lens;
  args.scale = scale;
  return args;
}

PositionTermArgs Step::position_term_args() const {
  return {.query = query.view,
          .pos_bias_v = pos_bias_v.view,
          .r = r.view,
          .context_lens = context_lens,
          .matrix_bd = {}};
}

Step make_step(const StepCase& shape) {
  Random random(testing::seed_from(shape.name));
  const auto num_seqs = static_cast<std::int64_t>(shape.context_lens.size());
  const std::int64_t x = 16 / size_of(shape.dtype), most = longest(shape);
  Step step;
  step.mode = shape.mode;
  step.scale = shape.scale;
  step.context_lens = Tensor(DType::i32, {num_seqs});
  for (std::int64_t s = 0; s < num_seqs; ++s) {
    step.context_lens.view().at<std::int32_t>(s) = shape.context_lens[static_cast<std::size_t>(s)];
  }
  step.block_tables = Tensor(DType::i32, {num_seqs, blocks_for(shape, most) + 3});
  const std::int64_t num_blocks = fill_block_tables(shape, step.block_tables, random);
  step.key_cache = make_unaligned(
      shape.dtype, {num_blocks, shape.num_kv_heads, shape.head_size / x, shape.block_size, x},
      shape.layout, 3);
  step.value_cache = make_unaligned(
      shape.dtype, {num_blocks, shape.num_kv_heads, shape.head_size, shape.block_size},
      shape.layout, 2);
  fill_caches(shape, step, random);

  step.query =
      make_unaligned(shape.dtype, {num_seqs, shape.num_heads, shape.head_size}, shape.layout);
  testing::fill_normal(step.query.view, random, shape.query);
  for (StridedTensor* bias : {&step.pos_bias_u, &step.pos_bias_v}) {
    std::vector<std::int64_t> sizes = {shape.num_heads, shape.head_size};
    if (shape.bias_per_sequence) sizes.insert(sizes.begin(), num_seqs);
    *bias = make_unaligned(shape.dtype, sizes, shape.layout);
    testing::fill_normal(bias->view, random);
  }
  step.matrix_bd = make_unaligned(shape.dtype_of_matrix_bd(),
                                  {num_seqs, shape.num_heads, most + shape.spare}, shape.layout);
  fill_matrix_bd(shape, step.matrix_bd.view, random);
  step.r = make_unaligned(shape.dtype, {shape.num_heads, most + shape.spare, shape.head_size},
                          shape.layout);
  // Distances beyond the longest context keep their NaN: they are not read.
  testing::fill_normal(step.r.view.slice(1, 0, most), random, 0.5);
  return step;
}

Tolerance tolerance(Quantity quantity, DType dtype, double largest_logit) {
  if (dtype == DType::f64) {
    const auto relative_to = quantity == Quantity::lse ? RelativeTo::nothing : RelativeTo::tensor;
    return {1e-11 + 64 * 0x1p-52 * largest_logit, relative_to};
  }
  constexpr double kEps32 = 0x1p-23;
  const double narrow = dtype == DType::f16 ? 2e-3 : 1e-2;
  // Weights are exp(logit - maximum): beyond the logits that the spec's figures are meant for, the
  // rounding of the logits in f32 shows.
  const double rounding = largest_logit > 30 ? 8 * kEps32 * largest_logit : 0;
  switch (quantity) {
    case Quantity::out:
      return {(dtype == DType::f32 ? 1e-5 : narrow) + rounding, RelativeTo::tensor, 1e-4};
    case Quantity::matrix_bd:
      return {dtype == DType::f32 ? 1e-5 : narrow, RelativeTo::tensor, 1e-4};
    case Quantity::lse:  // f32 for f16 and bf16 too; the spec leaves it open
      return {1e-5 + 8 * kEps32 * largest_logit, RelativeTo::nothing};
  }
  return {};
}

testing::Benchmark make_copy_benchmark(std::string name, std::string shape, double bytes,
                                       DeviceType device) {
  constexpr std::int64_t kGpuCopy = std::int64_t{4} << 30;
  testing::Benchmark benchmark;
  benchmark.name = std::move(name);
  benchmark.shape = std::move(shape);
  benchmark.bytes = bytes;
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes = device == DeviceType::cpu ? static_cast<std::int64_t>(bytes) : kGpuCopy;
  benchmark.device = device;
  return benchmark;
}

std::vector<std::int32_t> ragged_contexts() {
  std::vector<std::int32_t> lengths;
  Random random(3);
  for (int s = 0; s < 256; ++s) {
    lengths.push_back(static_cast<std::int32_t>(1 + random.below(16384)));
  }
  return lengths;
}

void fill_pattern(Tensor& tensor) {
  constexpr std::int64_t kPattern = (1 << 20) + 37;
  const std::int64_t count = std::min(kPattern, tensor.numel());
  const std::int64_t size = size_of(tensor.dtype());
  Tensor pattern(tensor.dtype(), {count});
  Random random(1);
  testing::fill_normal(pattern, random);
  auto* bytes = static_cast<char*>(tensor.data());
  copy_between(bytes, tensor.device(), pattern.data(), {}, static_cast<std::size_t>(count * size));
  for (std::int64_t done = count; done < tensor.numel(); done *= 2) {
    const std::int64_t next = std::min(done, tensor.numel() - done);
    copy_between(bytes + done * size, tensor.device(), bytes, tensor.device(),
                 static_cast<std::size_t>(next * size));
  }
}

}  // namespace winnow::paged_xl
