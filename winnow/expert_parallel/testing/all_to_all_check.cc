#include "winnow/expert_parallel/testing/all_to_all_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/layer/descriptor_oracle.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

// A caller's tensor: a copy of `from`, with rows further apart if asked for.
class Copy {
 public:
  Copy(const RankDevice& place, const ConstTensorView& from, bool strided) : place_(place) {
    if (!from.present()) return;
    const std::int64_t gap = strided ? 3 : 0;
    storage_ = place.make(from.dtype(), {{from.size(0), from.size(1) + gap}});
    view_ = storage_.view().slice(1, 0, from.size(1));
    place.write(view_, from);
  }
  const TensorView& view() const { return view_; }
  void spoil() {
    if (storage_.numel() > 0) place_.spoil(storage_.view());
  }

 private:
  const RankDevice& place_;
  Tensor storage_;
  TensorView view_;
};

// A tensor that dispatch writes to, with more rows than it needs; every bit is 1 before.
class Out {
 public:
  Out(const RankDevice& place, DType dtype, std::int64_t rows, std::int64_t hidden, bool strided)
      : place_(place), rows_(rows) {
    storage_ = place.make(dtype, {{rows + kMore, hidden + (strided ? kMore : 0)}});
    view_ = storage_.view().slice(1, 0, hidden);
  }
  const TensorView& view() const { return view_; }
  // A copy of the rows that were asked for.
  Tensor take() const { return place_.copy(place_.to_host(view_.slice(0, 0, rows_))); }
  // How many bytes were changed beside and behind these rows.
  std::int64_t bytes_outside() const {
    return changed(storage_.view().slice(1, view_.size(1), storage_.size(1))) +
           changed(storage_.view().slice(0, rows_, rows_ + kMore));
  }

 private:
  static constexpr std::int64_t kMore = 3;

  std::int64_t changed(const ConstTensorView& part) const {
    const Tensor now = place_.to_host(part);
    const auto* bytes = static_cast<const unsigned char*>(now.data());
    const std::int64_t size = now.numel() * size_of(now.dtype());
    return size - std::count(bytes, bytes + size, 0xff);
  }

  const RankDevice& place_;
  std::int64_t rows_;
  Tensor storage_;
  TensorView view_;
};

// So many rows: those of `from`, and NaN behind them, which must reach nobody. A dispatch that has
// gone wrong may give fewer rows than `from` has; its comparisons tell of that.
Tensor padded(const Tensor& from, DType dtype, std::int64_t rows, std::int64_t columns) {
  Tensor made(dtype, {rows, columns});
  if (made.numel() > 0) testing::fill_unwritten(made.view());
  const std::int64_t kept = std::min(made.numel(), from.numel());
  if (kept > 0) std::memcpy(made.data(), from.data(), std::size_t(kept * size_of(dtype)));
  return made;
}

// The values that a rank's experts give to combine, and the memory for those of its tokens.
class PairValues {
 public:
  PairValues(const RankDevice& place, const Problem& problem, const Round::Rank& mine,
             std::int64_t rows)
      : place_(place), problem_(problem), mine_(mine) {
    if (!problem.pair_values) return;
    given_.emplace(
        place,
        padded(mine.pair_values, problem.weight_dtype, rows, mine.pair_values.size(1)).view(),
        problem.strided);
    out_.emplace(place, mine.values, problem.strided);
    out_->spoil();
  }
  void add_to(CombineArgs& args) const {
    if (!given_) return;
    const TensorView& all = given_->view();
    args.pair_values = all;
    if (!problem_.token_major) {
      args.pair_values = {all.data(), all.dtype(), {all.size(0)}, {all.stride(0)}, place_.device()};
    }
    args.pair_values_out = out_->view();
    args.add_values = problem_.add_values;
  }
  void compare(std::string_view what, Comparisons& comparisons) {
    if (!given_) return;
    comparisons.add(compare_bits(what, place_.to_host(out_->view()), mine_.values));
    given_->spoil();
    place_.wait();  // before the memory goes
  }

 private:
  const RankDevice& place_;
  const Problem& problem_;
  const Round::Rank& mine_;
  std::optional<Copy> given_, out_;
};

// The scales of a caller column by column.
class ColumnMajor {
 public:
  ColumnMajor(const RankDevice& place, const Tensor& from, bool wanted) {
    if (!wanted || !from.view().present()) return;
    const std::int64_t rows = from.size(0), columns = from.size(1), size = size_of(from.dtype());
    Tensor turned(from.dtype(), {columns, rows});
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      std::memcpy(static_cast<char*>(turned.data()) + (i % columns * rows + i / columns) * size,
                  static_cast<const char*>(from.data()) + i * size, std::size_t(size));
    }
    storage_ = place.copy(turned);
    view_ =
        ConstTensorView(storage_.data(), from.dtype(), {rows, columns}, {1, rows}, place.device());
  }
  const ConstTensorView& view() const { return view_; }

 private:
  Tensor storage_;
  ConstTensorView view_;
};

}  // namespace

Dispatched dispatch_and_check(AllToAll& layer, const RankDevice& place, const Problem& problem,
                              const Round& round, int rank,
                              std::shared_ptr<const Descriptor> cached, Comparisons& comparisons) {
  const Round::Rank& mine = round.ranks[std::size_t(rank)];
  const Tensor wide = problem.wide_indices ? widened(mine.expert_indices) : Tensor();
  Copy input(place, mine.input, problem.strided),
      indices(place, wide.view().present() ? wide.view() : mine.expert_indices.view(),
              problem.strided),
      weights(place, mine.weights, problem.strided), scales(place, mine.scales, problem.strided),
      scatter(place, problem.scatter == Scatter::table ? round.scatter_table : mine.scatter, false);
  DispatchArgs args;
  args.input = input.view();
  args.weights = weights.view();
  args.scales = scales.view();
  const ColumnMajor columns(place, mine.scales, problem.scales_by_column);
  if (columns.view().present()) args.scales = columns.view();
  args.copy_out = problem.copy_out;
  args.cached = cached;
  args.stream = place.stream();
  if (cached == nullptr) {
    args.expert_indices = indices.view();
    args.scatter_indices = scatter.view();
    args.order = problem.token_major ? RowOrder::token_major : RowOrder::expert_major;
    args.expert_alignment = problem.alignment;
    if (problem.mode == Mode::worst_case) args.worst_case_rows = round.most_rows() + 5;
  }
  std::optional<Out> out;
  if (problem.out) {
    const std::int64_t counted = std::int64_t(round.rows[std::size_t(rank)].size());
    const bool worst_case = problem.mode == Mode::worst_case;
    const std::int64_t rows = worst_case ? round.most_rows() + 5 : counted;
    out.emplace(place, mine.input.dtype(), rows, problem.hidden, problem.strided);
    args.out = out->view();
  }
  Dispatched result = layer.dispatch(args);
  comparisons.ran_on(result.backend);
  if (out) {
    comparisons.add(compare_number("output beside out", result.output.view().present(), 0));
    comparisons.add(compare_number("bytes written outside of out", out->bytes_outside(), 0));
    result.output = out->take();
  }
  for (Copy* copy : {&input, &indices, &weights, &scales, &scatter}) copy->spoil();
  check_dispatched(place, problem, round, rank, result, comparisons);
  return result;
}

void check_dispatched(const RankDevice& place, const Problem& problem, const Round& round, int rank,
                      const Dispatched& got, Comparisons& comparisons) {
  const oracle::World& world = round.world;
  const auto& rows = round.rows[std::size_t(rank)];
  const bool worst_case = problem.mode == Mode::worst_case;
  const std::int64_t count = std::int64_t(rows.size());
  const std::int64_t all = worst_case ? round.most_rows() + 5 : count;
  const std::int64_t nodes = world.nodes(), slots = world.max_tokens, topk = world.topk;
  const auto seen = [&](const ConstTensorView& view) {
    return view.present() ? place.to_host(view) : Tensor();
  };
  // The rows that are placed, and then those that a worst-case output has beyond them.
  const auto head = [&](const Tensor& tensor) {
    const ConstTensorView view = tensor.view();
    return view.present() && view.size(0) == all ? view.slice(0, 0, count) : view;
  };
  const Tensor output = seen(got.output.view()), weights = seen(got.weights.view()),
               scales = seen(got.scales.view()), expert_ids = seen(got.expert_ids.view());
  comparisons.add(
      compare_bits("output", head(output), oracle::gather(world, rows, &oracle::RankInput::input)));
  const auto compare_optional = [&](std::string_view what, bool wanted, const Tensor& actual,
                                    const auto& make) {
    comparisons.add(compare_bits(what, head(actual), wanted ? make() : Tensor()));
  };
  compare_optional("weights", problem.weights, weights,
                   [&] { return oracle::gather_weights(world, rank, rows); });
  compare_optional("scales", problem.fp8, scales,
                   [&] { return oracle::gather(world, rows, &oracle::RankInput::scales); });
  compare_optional("expert_ids", problem.token_major, expert_ids,
                   [&] { return oracle::gather_expert_ids(world, rank, rows); });
  if (worst_case && weights.view().present() && weights.size(0) == all) {
    const std::vector<double> beyond = testing::read(weights.view().slice(0, count, all));
    comparisons.add(compare_number("weights of no rows", std::ranges::count(beyond, 0.0),
                                   std::int64_t(beyond.size())));
  }
  if (worst_case && expert_ids.view().present() && expert_ids.size(0) == all) {
    const std::vector<double> beyond = testing::read(expert_ids.view().slice(0, count, all));
    comparisons.add(compare_number("expert_ids of no rows", std::ranges::count(beyond, -1.0),
                                   std::int64_t(beyond.size())));
  }

  const Descriptor& descriptor = *got.descriptor;
  comparisons.add(compare_number("rows", descriptor.rows(), all));
  comparisons.add(compare_number("output rows", got.output.size(0), all));
  const bool counts_wait = worst_case && place.on_gpu();  // nobody on the host has read them
  comparisons.add(
      compare_number("wanted_rows", descriptor.wanted_rows(), counts_wait ? -1 : count));
  comparisons.add(compare_number("order", int(descriptor.order()), int(problem.token_major)));
  comparisons.add(
      compare_number("expert_alignment", descriptor.expert_alignment(), problem.alignment));
  comparisons.add(
      compare_number("worst_case_rows", descriptor.worst_case_rows(), worst_case ? all : 0));
  comparisons.add(compare_number("has_weights", descriptor.has_weights(), problem.weights));
  comparisons.add(compare_number("num_dispatch_token_cur_rank",
                                 descriptor.num_dispatch_token_cur_rank(), world.tokens(rank)));
  std::vector<std::int64_t> tokens, wanted;
  for (int r = 0; r < world.world_size; ++r) {
    tokens.push_back(world.tokens(r));
    wanted.push_back(std::int64_t(round.rows[std::size_t(r)].size()));
  }
  comparisons.add(compare_integers("wanted_rows_per_rank", seen(descriptor.wanted_rows_per_rank()),
                                   DType::i64, {world.world_size}, wanted));
  comparisons.add(compare_integers("num_input_tokens_per_rank",
                                   seen(descriptor.num_input_tokens_per_rank()), DType::i32,
                                   {world.world_size}, tokens));
  if (nodes > 1) {
    comparisons.add(compare_integers("send_reqs_recv", seen(descriptor.send_reqs_recv()),
                                     DType::i32, {nodes, 2, slots},
                                     oracle::send_requests(world, rank)));
  } else {
    comparisons.add(compare_number("send_reqs_recv", descriptor.send_reqs_recv().present(), 0));
  }
  comparisons.add(compare_integers("topk_indices", seen(descriptor.topk_indices()), DType::i32,
                                   {nodes, slots, topk}, oracle::topk_indices(world, rank)));
  comparisons.add(compare_integers(
      "token_dst_scatter_idx", seen(descriptor.token_dst_scatter_idx()), DType::i32,
      {nodes, slots, topk}, oracle::token_dst_scatter_idx(world, rank, round.rows)));
  std::vector<std::int64_t> first = oracle::first_copy(world, rank, rows);
  std::vector<std::int64_t> copies = oracle::copies(world, rank, rows);
  first.resize(std::size_t(all), -1);
  copies.resize(std::size_t(all * topk), -1);
  comparisons.add(compare_integers("skipped_token_mapping_indices",
                                   seen(descriptor.skipped_token_mapping_indices()), DType::i64,
                                   {all}, first));
  comparisons.add(compare_integers("skipped_token_topk_mapping_indices",
                                   seen(descriptor.skipped_token_topk_mapping_indices()),
                                   DType::i64, {all, topk}, copies));
  const std::vector<std::int64_t> counts = oracle::expert_counts(world, rank);
  const std::int64_t experts = std::int64_t(counts.size());
  comparisons.add(compare_integers("expert_counts", seen(descriptor.expert_counts()), DType::i32,
                                   {experts}, counts));
  const std::vector<std::int64_t> offsets = oracle::expert_offsets(world, rank);
  comparisons.add(compare_integers("expert_offsets", seen(descriptor.expert_offsets()), DType::i32,
                                   {experts + 1}, offsets));
  const ConstTensorView host_counts = descriptor.host_expert_counts(),
                        host_offsets = descriptor.host_expert_offsets();
  comparisons.add(compare_number("host_expert_counts", host_counts.present(), !counts_wait));
  if (counts_wait) return;
  comparisons.add(compare_integers("host_expert_counts", RankDevice().to_host(host_counts),
                                   DType::i32, {experts}, counts));
  comparisons.add(compare_integers("host_expert_offsets", RankDevice().to_host(host_offsets),
                                   DType::i32, {experts + 1}, offsets));
}

void combine_and_check(AllToAll& layer, const RankDevice& place, const Problem& problem,
                       const Round& round, int rank, const Dispatched& got,
                       Comparisons& comparisons) {
  const Round::Rank& mine = round.ranks[std::size_t(rank)];
  const Tensor rows =
      padded(mine.expert_output, problem.dtype, got.descriptor->rows(), problem.hidden);
  Copy own(place, rows.view(), problem.strided), bias(place, mine.bias, problem.strided),
      second_bias(place, mine.second_bias, problem.strided),
      weights(place, mine.combine_weights, problem.strided);
  CombineArgs args;
  args.expert_output = own.view();
  TensorView written;  // of the arena
  if (problem.expert_rows != ExpertRows::own) {
    written = problem.expert_rows == ExpertRows::in_place
                  ? TensorView(const_cast<void*>(got.output.data()), got.output.dtype(),
                               got.output.view().shape(), place.device())
                  : layer.combine_buffer(*got.descriptor);
    comparisons.add(compare_number("rows of combine_buffer", written.size(0), rows.size(0)));
    place.write(written, rows.view());
    args.expert_output = written;
  }
  args.bias = bias.view();
  args.second_bias = second_bias.view();
  args.weights = weights.view();
  args.weighted = problem.weighted_combine;
  args.stream = place.stream();
  PairValues values(place, problem, mine, got.descriptor->rows());
  values.add_to(args);
  const Tensor sums = layer.combine(args, *got.descriptor);
  comparisons.ran_on(layer.backend());
  values.compare("pair_values", comparisons);
  // No other rank reads these rows any more.
  if (written.present() && written.numel() > 0) place.spoil(written);
  own.spoil();
  for (Copy* copy : {&bias, &second_bias, &weights}) copy->spoil();
  comparisons.add(compare_bits("combine", place.to_host(sums.view()), mine.combined));

  // Once more, into the caller's memory.
  Copy own_again(place, rows.view(), false), bias_again(place, mine.bias, false),
      second_again(place, mine.second_bias, false),
      weights_again(place, mine.combine_weights, false), out(place, mine.combined, problem.strided);
  out.spoil();
  args.expert_output = own_again.view();
  args.bias = bias_again.view();
  args.second_bias = second_again.view();
  args.weights = weights_again.view();
  args.out = out.view();
  if (problem.sm_count > 2) args.sm_count = 2;
  const Tensor nothing = layer.combine(args, *got.descriptor);
  comparisons.add(compare_number("result beside out", nothing.view().present(), 0));
  comparisons.add(compare_bits("combine into out", place.to_host(out.view()), mine.combined));
  if (!problem.pair_values) return;

  // The values alone.
  PairValues alone(place, problem, mine, got.descriptor->rows());
  CombineArgs only;
  only.stream = place.stream();
  alone.add_to(only);
  const Tensor no_sums = layer.combine(only, *got.descriptor);
  comparisons.add(compare_number("result without rows", no_sums.view().present(), 0));
  alone.compare("pair_values alone", comparisons);
}

Comparisons run_rank(AllToAll& layer, const Problem& problem, const std::vector<Round>& rounds) {
  Comparisons comparisons;
  const RankDevice place(layer.config().device);
  const int rank = layer.rank();
  std::vector<Dispatched> dispatched(rounds.size());
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    const bool cached = problem.mode == Mode::cached && i > 0;
    dispatched[i] = dispatch_and_check(layer, place, problem, rounds[i], rank,
                                       cached ? dispatched[0].descriptor : nullptr, comparisons);
    if (problem.in_flight) continue;
    combine_and_check(layer, place, problem, rounds[i], rank, dispatched[i], comparisons);
    if (problem.mode != Mode::cached) dispatched[i] = {};
  }
  for (std::size_t i = rounds.size(); problem.in_flight && i-- > 0;) {
    combine_and_check(layer, place, problem, rounds[i], rank, dispatched[i], comparisons);
  }
  // Later calls have not touched what the first ones returned.
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    if (dispatched[i].descriptor == nullptr) continue;
    if (problem.expert_rows == ExpertRows::in_place) continue;
    check_dispatched(place, problem, rounds[i], rank, dispatched[i], comparisons);
  }
  return comparisons;
}

Comparisons run_in_process(const Problem& problem, Device device, std::optional<Backend> backend) {
  const std::vector<Round> rounds = make_rounds(problem);
  Config config = problem.config();
  config.device = device;
  config.backend = backend;
  if (device.type == DeviceType::cuda) config.timeout = std::chrono::seconds(10);
  RankTeam team(problem.world_size());
  return compare_on_ranks(team, [&](int, const std::shared_ptr<Transport>& transport) {
    AllToAll layer(transport, team.world().store(), config);
    return run_rank(layer, problem, rounds);
  });
}

}  // namespace winnow::expert_parallel
