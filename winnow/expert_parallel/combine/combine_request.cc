// The arguments of one rank's combine, checked, on either backend.
#include <cstdint>
#include <limits>
#include <string>

#include "winnow/core/check.h"
#include "winnow/expert_parallel/combine/combine_impl.h"

namespace winnow::expert_parallel {
namespace {

void check_pair_values(const Check& check, const Config& config, const CombineArgs& args,
                       const Routing& routing, std::int64_t rows) {
  const ConstTensorView& values = args.pair_values;
  if (!values.present()) {
    check.that(!args.pair_values_out.present(), "pair_values_out", "none without pair_values",
               to_string(args.pair_values_out));
    return;
  }
  check.that(!args.add_values || routing.order == RowOrder::token_major, "add_values",
             "false in expert-major order", "true");
  constexpr std::int64_t kMostColumns = std::numeric_limits<std::int32_t>::max();
  check.that(args.pair_columns >= 0 && args.pair_columns <= kMostColumns, "pair_columns",
             "0 to " + std::to_string(kMostColumns), std::to_string(args.pair_columns));
  const Dim row{"rows", rows}, pair{"topk", config.topk};
  if (routing.order == RowOrder::token_major) {
    check.input("pair_values", values, {row, pair}, {config.weight_dtype}, config.device);
  } else {
    check.shape("pair_values", values, {row});
    check.dtype("pair_values", values, {config.weight_dtype});
    check.device("pair_values", values, config.device);
    check.aligned("pair_values", values, size_of(values.dtype()));
  }
  check.output("pair_values_out", args.pair_values_out, {{"n", routing.tokens}, pair},
               {config.weight_dtype}, config.device);
  check.apart({{"pair_values_out", args.pair_values_out}}, {{"pair_values", args.pair_values},
                                                            {"expert_output", args.expert_output},
                                                            {"bias", args.bias},
                                                            {"second_bias", args.second_bias},
                                                            {"weights", args.weights},
                                                            {"out", args.out}});
}

}  // namespace

TensorView buffer_of(const Config& config, const Descriptor::State& state) {
  return {state.buffer->data(), config.dtype, {state.rows(), config.hidden}, config.device};
}

void check_descriptor(const Check& check, const std::shared_ptr<const char>& layer,
                      const Descriptor::State& state) {
  check.that(state.layer == layer, "descriptor", "one of this layer",
             state.layer == nullptr ? "one without a dispatch" : "another layer's");
}

Options combine_options(const CombineArgs& args, const Descriptor::State& state) {
  Options options;
  options.call = Call::combine;
  options.weighted = args.weighted;
  options.weights = args.weights.present();
  options.descriptor = static_cast<std::int64_t>(state.number);
  if (args.pair_values.present()) {
    options.pair_values = args.expert_output.present() ? 1 : 2;
    options.add_values = args.add_values;
    options.pair_columns = args.pair_columns;
  }
  options.sm_count = args.sm_count;
  return options;
}

void check_combine(const Config& config, const std::shared_ptr<const char>& layer,
                   const CombineArgs& args, const Descriptor::State& state) {
  if (args.refusal != nullptr) throw *args.refusal;
  const Check check(kCombine);
  check_descriptor(check, layer, state);
  check_sm_count(check, config, args.sm_count);
  const Dim hidden{"hidden", config.hidden};
  const std::int64_t tokens = state.routing->tokens;
  const TensorView buffer = buffer_of(config, state);
  const bool only_values = args.pair_values.present() && !args.expert_output.present();
  check_pair_values(check, config, args, *state.routing, state.rows());
  if (only_values) {
    for (const Named& given : {Named{"bias", args.bias}, Named{"second_bias", args.second_bias},
                               Named{"weights", args.weights}, Named{"out", args.out}}) {
      check.that(given.layout == nullptr, given.argument, "none without expert_output", "one");
    }
    check.that(!args.weighted, "weighted", "false without expert_output", "true");
    return;
  }
  check.input("expert_output", args.expert_output, {{"rows", state.rows()}, hidden}, {config.dtype},
              config.device);
  const bool dense = state.rows() <= 1 || args.expert_output.stride(0) == config.hidden;
  check.that(dense || !share_memory(args.expert_output, buffer), "expert_output",
             "dense rows where they lie in combine_buffer()", "others");  // it is copied there
  const auto check_bias = [&](std::string_view name, const ConstTensorView& bias) {
    if (bias.present()) {
      check.input(name, bias, {{"n", tokens}, hidden}, {config.dtype}, config.device);
    }
  };
  check_bias("bias", args.bias);
  check_bias("second_bias", args.second_bias);
  check.that(args.bias.present() || !args.second_bias.present(), "second_bias", "none without bias",
             "one");
  if (args.out.present()) {
    check.output("out", args.out, {{"n", tokens}, hidden}, {config.dtype}, config.device);
    // Other ranks read the rows there while this one writes its sums.
    check.that(!share_memory(args.out, args.expert_output) && !share_memory(args.out, buffer),
               "out", "memory apart from expert_output and combine_buffer()", "some of theirs");
    const auto apart = [&](std::string_view name, const ConstTensorView& bias) {
      const bool in_place = bias.present() && bias.data() == args.out.data() &&
                            (tokens <= 1 || bias.stride(0) == args.out.stride(0));
      check.that(!bias.present() || in_place || !share_memory(args.out, bias), "out",
                 "memory apart from " + std::string(name) + ", or the same", "some of it");
    };
    apart("bias", args.bias);
    apart("second_bias", args.second_bias);
    check.apart({{"out", args.out}},
                {{"weights", args.weights}, {"pair_values", args.pair_values}});
  }
  const bool expert_major = state.routing->order == RowOrder::expert_major;
  if (args.weights.present()) {
    check.that(!args.weighted, "weights", "none beside weighted", "some");
    check.that(expert_major, "weights", "none in token-major order", "some");
    check.input("weights", args.weights, {{"n", tokens}, {"topk", config.topk}},
                {config.weight_dtype}, config.device);
  }
  if (!args.weighted) return;
  check.that(expert_major, "weighted", "false in token-major order", "true");
  check.that(state.has_weights, "weighted", "weights that were sent at dispatch", "none");
}

}  // namespace winnow::expert_parallel
