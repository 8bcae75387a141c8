#include "winnow/expert_parallel/dispatch/dispatch_request.h"

#include <memory>
#include <string>
#include <utility>

#include "winnow/core/check.h"
#include "winnow/core/read_once.h"
#include "winnow/expert_parallel/dispatch/dispatch_index.h"
#include "winnow/expert_parallel/layer/rail_weights.h"
#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {
namespace {

// Indices of i64 as i32, each read once.
Tensor narrowed(const ConstTensorView& wide) {
  Tensor narrow(DType::i32, {wide.size(0), wide.size(1)});
  for (std::int64_t token = 0; token < wide.size(0); ++token) {
    for (std::int64_t k = 0; k < wide.size(1); ++k) {
      narrow.view().at<std::int32_t>(token, k) =
          narrow_index(read_once(&wide.at<std::int64_t>(token, k)));
    }
  }
  return narrow;
}

void check_scales(const Check& check, const Config& config, const DispatchArgs& args) {
  const ConstTensorView& scales = args.scales;
  check.rank("scales", scales, 2, "[n, columns]");
  check.shape("scales", scales, {{"n", args.input.size(0)}, {"columns", scales.size(1)}});
  check.dtype("scales", scales,  // opaque, but of a known size
              {DType::f32, DType::i32, DType::u8, DType::f16, DType::bf16, DType::f8_e4m3,
               DType::i64, DType::f64});
  check.device("scales", scales, config.device);
  check.aligned("scales", scales, size_of(scales.dtype()));
  const std::int64_t bytes = scales.size(1) * size_of(scales.dtype());
  const std::int64_t most = most_scale_bytes(config.hidden);
  check.that(bytes > 0 && bytes % 4 == 0 && bytes <= most, "scales",
             "rows of a multiple of 4 bytes, 4 to " + std::to_string(most),
             std::to_string(bytes) + " bytes");
}

void check_input(const Check& check, const Config& config, const DispatchArgs& args) {
  check.rank("input", args.input, 2, "[n, hidden]");
  const std::int64_t tokens = args.input.size(0);
  check.input("input", args.input, {{"n", tokens}, {"hidden", config.hidden}},
              {config.dtype, DType::f8_e4m3}, config.device);
  check.that(tokens <= config.max_tokens, "input",
             "at most max_tokens = " + std::to_string(config.max_tokens) + " tokens",
             std::to_string(tokens));
  if (args.input.dtype() == DType::f8_e4m3) {
    check.that(config.hidden % 16 == 0, "input",
               "a hidden size that is a multiple of 16 for f8_e4m3", std::to_string(config.hidden));
    check_scales(check, config, args);
  } else {
    check.that(!args.scales.present(), "scales", "none, since input is not f8_e4m3",
               to_string(args.scales));
  }
  if (args.weights.present()) {
    check.input("weights", args.weights, {{"n", tokens}, {"topk", config.topk}},
                {config.weight_dtype}, config.device);
  }
}

void check_scatter(const Check& check, const Config& config, const DispatchArgs& args) {
  const ConstTensorView& scatter = args.scatter_indices;
  check.rank("scatter_indices", scatter, 2, "[n or the sum of n, topk]");
  check.input("scatter_indices", scatter, {{"rows", scatter.size(0)}, {"topk", config.topk}},
              {DType::i32}, config.device);
  check.that(args.order == RowOrder::expert_major, "scatter_indices", "none in token-major order",
             to_string(scatter));
  check.that(args.expert_alignment == 1, "scatter_indices", "none with expert_alignment above 1",
             to_string(scatter));
  check.that(args.worst_case_rows == 0, "scatter_indices", "none with worst_case_rows",
             to_string(scatter));
}

void check_routing(const Check& check, const Config& config, const DispatchArgs& args) {
  check.input("expert_indices", args.expert_indices,
              {{"n", args.input.size(0)}, {"topk", config.topk}}, {DType::i32, DType::i64},
              config.device);
  check.that(args.expert_alignment >= 1 && args.expert_alignment <= kMostRows, "expert_alignment",
             "1 to " + std::to_string(kMostRows), std::to_string(args.expert_alignment));
  check.that(args.order == RowOrder::expert_major || args.expert_alignment == 1, "expert_alignment",
             "1 in token-major order", std::to_string(args.expert_alignment));
  check.that(args.worst_case_rows >= 0 && args.worst_case_rows <= kMostRows, "worst_case_rows",
             "0 to " + std::to_string(kMostRows), std::to_string(args.worst_case_rows));
  if (args.scatter_indices.present()) check_scatter(check, config, args);
}

void check_repeat(const Check& check, const std::shared_ptr<const char>& layer,
                  const DispatchArgs& args) {
  const Descriptor::State& state = args.cached->state();
  check.that(state.layer == layer, "cached", "a descriptor of this layer", "another layer's");
  const Routing& routing = *state.routing;
  const std::int64_t tokens = args.input.size(0);
  check.that(tokens == routing.tokens, "input",
             "the " + std::to_string(routing.tokens) + " tokens of the descriptor",
             std::to_string(tokens));
  check.that(!args.expert_indices.present(), "expert_indices", "none beside a descriptor",
             to_string(args.expert_indices));
  check.that(!args.scatter_indices.present(), "scatter_indices", "none beside a descriptor",
             to_string(args.scatter_indices));
  check.that(args.order == RowOrder::expert_major || args.order == routing.order, "order",
             "that of the descriptor, expert_major", "token_major");
  const auto as_before = [&](std::string_view argument, std::int64_t value, std::int64_t neutral,
                             std::int64_t before) {
    check.that(value == neutral || value == before, argument,
               "that of the descriptor, " + std::to_string(before), std::to_string(value));
  };
  as_before("expert_alignment", args.expert_alignment, 1, routing.expert_alignment);
  as_before("worst_case_rows", args.worst_case_rows, 0, routing.worst_case_rows);
}

// `known`: the number of rows that arrive, or 0 where they are still to be counted.
void check_out(const Check& check, const Config& config, const DispatchArgs& args,
               std::int64_t known) {
  check.rank("out", args.out, 2, "[rows, hidden]");
  const std::int64_t rows = args.out.size(0);
  check.output("out", args.out, {{"rows", rows}, {"hidden", config.hidden}}, {args.input.dtype()},
               config.device);
  check.that(rows >= known, "out", std::to_string(known) + " rows or more", std::to_string(rows));
  check.apart({{"out", args.out}}, {{"input", args.input},
                                    {"expert_indices", args.expert_indices},
                                    {"weights", args.weights},
                                    {"scales", args.scales},
                                    {"scatter_indices", args.scatter_indices}});
}

}  // namespace

Request check_request(const Config& config, const std::shared_ptr<const char>& layer,
                      const DispatchArgs& args) {
  if (args.refusal != nullptr) throw *args.refusal;
  const Check check(kDispatch);
  check_input(check, config, args);
  Request request;
  request.tokens = args.input.size(0);
  request.input = args.input.dtype();
  request.row_bytes = config.hidden * size_of(request.input);
  if (args.scales.present()) {
    request.scale_dtype = args.scales.dtype();
    request.scale_bytes = args.scales.size(1) * size_of(request.scale_dtype);
  }
  check_sm_count(check, config, args.sm_count);
  request.weights = args.weights.present();
  request.scatter = args.scatter_indices.present();
  request.copy_out = args.copy_out || args.out.present();
  if (args.cached == nullptr) {
    check_routing(check, config, args);
    request.order = args.order;
    request.expert_alignment = args.expert_alignment;
    request.worst_case_rows = args.worst_case_rows;
  } else {
    check_repeat(check, layer, args);
    request.cached = args.cached->state().routing;
    request.order = request.cached->order;
    request.expert_alignment = request.cached->expert_alignment;
    request.worst_case_rows = request.cached->worst_case_rows;
  }
  if (args.out.present()) {
    const int rank = request.cached ? args.cached->state().rank : 0;
    check_out(check, config, args,
              request.cached ? request.cached->rows_of(rank) : request.worst_case_rows);
  }
  return request;
}

Header make_header(const Request& request, const DispatchArgs& args) {
  Header header;
  Options& options = header.options;
  options.call = request.cached ? Call::cached_dispatch : Call::dispatch;
  options.order = static_cast<std::int64_t>(request.order);
  options.expert_alignment = request.expert_alignment;
  options.worst_case_rows = request.worst_case_rows;
  options.input = static_cast<std::int64_t>(request.input);
  options.weights = request.weights;
  options.scatter_indices = request.scatter;
  options.copy_out = request.copy_out;
  options.cached = request.cached ? static_cast<std::int64_t>(request.cached->number) : 0;
  options.scale_bytes = request.scale_bytes;
  options.sm_count = args.sm_count;
  header.tokens = request.tokens;
  if (request.scatter) header.scatter_rows = args.scatter_indices.size(0);
  if (args.out.present()) header.out_rows = args.out.size(0);
  return header;
}

std::shared_ptr<Routing> make_routing(const Request& request, const Config& config,
                                      const ExpertMap& map, std::uint64_t number) {
  auto routing = std::make_shared<Routing>();
  routing->number = number;
  routing->order = request.order;
  routing->expert_alignment = request.expert_alignment;
  routing->worst_case_rows = request.worst_case_rows;
  routing->world = map.topology.world_size;
  routing->nodes = map.topology.nodes();
  routing->max_tokens = config.max_tokens;
  routing->topk = map.topk;
  routing->experts_per_rank = map.per_rank();
  routing->tokens = request.tokens;
  return routing;
}

std::vector<std::byte> make_table(const Request& request, const DispatchArgs& args) {
  std::vector<std::byte> table;
  if (request.cached == nullptr) {
    const ConstTensorView& given = args.expert_indices;
    append_rows(table, given.dtype() == DType::i64 ? narrowed(given).view() : given);
  }
  if (request.weights) append_rows(table, args.weights);
  return table;
}

void check_row_counts(std::span<const std::int64_t> rows, RowOrder order, std::int64_t topk) {
  const std::int64_t most = kMostRows / (order == RowOrder::token_major ? topk : 1);
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank] <= most) continue;
    throw Error(ErrorCode::invalid_argument, std::string(kDispatch), "expert_indices",
                "at most " + std::to_string(most) + " rows on a rank",
                std::to_string(rows[rank]) + " on rank " + std::to_string(rank));
  }
}

std::unique_ptr<Descriptor::State> make_state(std::shared_ptr<const void> layer, int rank,
                                              std::uint64_t number, const Request& request,
                                              std::shared_ptr<const Routing> routing,
                                              std::shared_ptr<Region> buffer,
                                              std::int64_t values_at) {
  auto state = std::make_unique<Descriptor::State>();
  state->layer = std::move(layer);
  state->rank = rank;
  state->number = number;
  state->routing = std::move(routing);
  state->has_weights = request.weights;
  state->buffer = std::move(buffer);
  state->values_at = values_at;
  return state;
}

}  // namespace winnow::expert_parallel
