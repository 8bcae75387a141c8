#include "winnow/expert_parallel/queue_buffers/queue_buffers.h"

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

struct Argument {
  std::string_view name;
  std::int64_t value;
  std::int64_t least;
};

// Sums and products of one call that never wrap around.
class Arithmetic {
 public:
  Arithmetic(std::string_view function, std::initializer_list<Argument> arguments)
      : operation_("expert_parallel::" + std::string(function)), arguments_(arguments) {
    for (const Argument& argument : arguments_) {
      if (argument.value >= argument.least) continue;
      throw Error(ErrorCode::invalid_argument, operation_, std::string(argument.name),
                  "at least " + std::to_string(argument.least), std::to_string(argument.value));
    }
  }

  std::int64_t product(std::initializer_list<std::int64_t> factors) const {
    std::int64_t result = 1;
    for (const std::int64_t factor : factors) {
      if (factor == 0) return 0;
    }
    for (const std::int64_t factor : factors) {
      if (__builtin_mul_overflow(result, factor, &result)) overflow();
    }
    return result;
  }

  std::int64_t sum(std::initializer_list<std::int64_t> terms) const {
    std::int64_t result = 0;
    for (const std::int64_t term : terms) {
      if (__builtin_add_overflow(result, term, &result)) overflow();
    }
    return result;
  }

  BufferLayout buffer(std::int64_t control_offset, std::int64_t control_words) const {
    return {control_offset, control_words, sum({control_offset, product({4, control_words})})};
  }

 private:
  [[noreturn]] void overflow() const {
    std::string got = "more for";
    for (const Argument& argument : arguments_) {
      got += (got.ends_with("for") ? " " : ", ") + std::string(argument.name) + " " +
             std::to_string(argument.value);
    }
    throw Error(ErrorCode::invalid_argument, operation_, "size", "at most 2^63 - 1 bytes", got);
  }

  std::string operation_;
  std::vector<Argument> arguments_;
};

Arithmetic queue_arithmetic(std::string_view function, const QueueShape& shape) {
  return {function,
          {{"bytes_per_token", shape.bytes_per_token, 1},
           {"recv_tokens", shape.recv_tokens, 0},
           {"nodes", shape.nodes, 1},
           {"local_world_size", shape.local_world_size, 1},
           {"channels", shape.channels, 1}}};
}

}  // namespace

std::int64_t source_meta_bytes(std::int64_t local_world_size) {
  const Arithmetic count("source_meta_bytes", {{"local_world_size", local_world_size, 1}});
  return 4 + 4 * ((local_world_size - 1) / 32 + 1);
}

std::int64_t bytes_per_token(std::int64_t hidden_bytes, std::int64_t num_scales,
                             std::int64_t num_topk_indices, std::int64_t num_topk_weights,
                             std::int64_t local_world_size) {
  const Arithmetic count("bytes_per_token", {{"hidden_bytes", hidden_bytes, 0},
                                             {"num_scales", num_scales, 0},
                                             {"num_topk_indices", num_topk_indices, 0},
                                             {"num_topk_weights", num_topk_weights, 0},
                                             {"local_world_size", local_world_size, 1}});
  const std::int64_t bytes =
      count.sum({hidden_bytes, source_meta_bytes(local_world_size), count.product({4, num_scales}),
                 count.product({4, num_topk_indices}), count.product({4, num_topk_weights})});
  return count.sum({bytes, 15}) / 16 * 16;
}

BufferLayout node_buffer_layout(const QueueShape& shape) {
  const Arithmetic count = queue_arithmetic("node_buffer_layout", shape);
  return count.buffer(
      count.product({shape.bytes_per_token, shape.recv_tokens, shape.nodes, 2, shape.channels}),
      count.product({count.sum({count.product({2, shape.local_world_size}), 4}), shape.nodes, 2,
                     shape.channels}));
}

BufferLayout local_buffer_layout(const QueueShape& shape) {
  const Arithmetic count = queue_arithmetic("local_buffer_layout", shape);
  return count.buffer(
      count.product(
          {shape.bytes_per_token, shape.recv_tokens, shape.local_world_size, shape.channels}),
      count.product({shape.local_world_size, count.sum({count.product({2, shape.nodes}), 2}),
                     shape.channels}));
}

CleanMeta classic_clean_meta(QueueRoute route, const QueueShape& shape) {
  if (shape.local_world_size != 8) {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::classic_clean_meta",
                "local_world_size", "8", std::to_string(shape.local_world_size));
  }
  const BufferLayout buffer =
      route == QueueRoute::between_nodes ? node_buffer_layout(shape) : local_buffer_layout(shape);
  return {buffer.control_offset / 4, buffer.control_words};
}

}  // namespace winnow::expert_parallel
