#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/combine/combine_row_sum.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/routing/rail_sources.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = "expert_parallel::combine";

// Sums that are put at once: they stay in the cache until then.
constexpr std::int64_t kStagedTokens = 32;
// Of one token on one node, and one more for what is being inserted.
constexpr int kMaxAddends = 33;

// One rank's part of one combine, step by step as the protocol's page tells it.
class Combine {
 public:
  Combine(Layer& layer, const CombineArgs& args, const Descriptor& descriptor)
      : layer_(layer),
        args_(args),
        state_(descriptor.state()),
        routing_(*state_.routing),
        sources_(layer.map, routing_, layer.communicator.local()) {}

  Tensor run() {
    post();
    find_rows();
    for (std::int64_t chunk = 0; chunk < sources_.most_chunks(); ++chunk) reduce_for_others(chunk);
    for (std::int64_t chunk = 0; chunk < sources_.chunks(layer_.node()); ++chunk) finish_own(chunk);
    layer_.rail.finish("the end of the sums");
    return std::move(result_);
  }

 private:
  void post();
  Extent place_expert_output() const;
  void find_rows();
  void reduce_for_others(std::int64_t chunk);
  void finish_own(std::int64_t chunk);
  int add_node(int node, std::int64_t token, Addend* addends) const;
  void sum(const Addend* addends, int count, const void* bias, void* to) const;

  Layer& layer_;
  const CombineArgs& args_;
  const Descriptor::State& state_;
  const Routing& routing_;
  RailSources sources_;
  Tensor result_;  // unless the caller gave its own
  TensorView out_;
  std::vector<const std::byte*> rows_;  // [L] the expert rows of each rank of this node
  std::vector<std::byte> staged_;       // [kStagedTokens, H] sums for another node
};

// Says where this rank's expert rows are, or what is wrong, and hears the same from all.
void Combine::post() {
  Header header;
  header.refuse_what_throws(kOperation, [&] {
    check_combine(layer_.config, layer_.token, args_, state_);
    header.options.call = Call::combine;
    header.options.weighted = args_.weighted;
    header.options.descriptor = static_cast<std::int64_t>(state_.number);
    header.rows = place_expert_output();
    out_ = args_.out;
    if (!out_.present()) {
      result_ = Tensor(layer_.config.dtype, {routing_.tokens, layer_.config.hidden});
      out_ = result_;
    }
    staged_.resize(layer_.nodes() > 1 ? std::size_t(kStagedTokens * layer_.row_bytes()) : 0);
  });
  layer_.meet(kOperation, "the expert rows", header);
  layer_.exchange.throw_refusals(kOperation);
}

// Where in the arena the rows are; copies them there unless they are.
Extent Combine::place_expert_output() const {
  const ConstTensorView& rows = args_.expert_output;
  const std::int64_t bytes = layer_.row_bytes(), stride = rows.stride(0) * size_of(rows.dtype());
  if (rows.size(0) <= 1 || stride == bytes) {
    const Extent found = layer_.arena.locate(rows.data(), rows.size(0) * bytes);
    if (found.segment >= 0) return found;
  }
  const auto* from = static_cast<const std::byte*>(rows.data());
  std::byte* to = state_.buffer->data();
  const bool dense = stride == bytes;
  const std::int64_t step = dense ? rows.size(0) : 1;
  for (std::int64_t row = 0; row < rows.size(0); row += step) {
    std::memcpy(to + row * bytes, from + row * stride, static_cast<std::size_t>(step * bytes));
  }
  return state_.buffer->extent();
}

void Combine::find_rows() {
  const Topology& topology = layer_.map.topology;
  for (int local = 0; local < topology.local_world_size; ++local) {
    const Extent& extent = layer_.exchange.header(topology.rank(layer_.node(), local)).rows;
    SymmetricMemory& memory = layer_.arena.memory(extent.segment);
    rows_.push_back(layer_.communicator.node_pointer(memory, local) + extent.offset);
  }
}

// The rows of a rail source's token on this node, ranks ascending and k ascending within a rank.
// The number of addends.
int Combine::add_node(int node, std::int64_t token, Addend* addends) const {
  const Topology& topology = layer_.map.topology;
  const std::size_t pair = sources_.pair(node, token);
  const bool one_row_per_rank = routing_.order == RowOrder::token_major;
  int locals[kMaxAddends];  // of the addends: insertion sort, stable
  int count = 0;
  for (int k = 0; k < routing_.topk; ++k) {
    const std::int32_t row = routing_.rows[pair + std::size_t(k)];
    if (row < 0) continue;
    const int local = topology.local(layer_.map.rank_of(routing_.indices[pair + std::size_t(k)]));
    int at = count;
    while (at > 0 && locals[at - 1] > local) --at;
    if (one_row_per_rank && at > 0 && locals[at - 1] == local) continue;
    std::copy_backward(locals + at, locals + count, locals + count + 1);
    std::copy_backward(addends + at, addends + count, addends + count + 1);
    locals[at] = local;
    addends[at] = Addend{.row = rows_[std::size_t(local)] + row * layer_.row_bytes()};
    if (args_.weighted) addends[at].weight = state_.weights[pair + std::size_t(k)];
    ++count;
  }
  for (int i = 0; i < count; ++i) {
    addends[i].ends_node = i + 1 == count;
    addends[i].ends_rank = i + 1 == count || locals[i] != locals[i + 1];
    addends[i].round_rank =
        layer_.config.enable_local_combine && locals[i] != layer_.communicator.local();
  }
  return count;
}

void Combine::sum(const Addend* addends, int count, const void* bias, void* to) const {
  static const auto sum_rows = cpu_kernels().expert_parallel_sum_rows;
  sum_rows({layer_.config.dtype, layer_.config.hidden, addends, count, args_.weighted, bias, to});
}

// The sums over this node of the other nodes' tokens, sent back as they are ready.
void Combine::reduce_for_others(std::int64_t chunk) {
  Addend addends[kMaxAddends];
  const std::int64_t bytes = layer_.row_bytes();
  for (int step = 1; step < layer_.nodes(); ++step) {
    const int to = (layer_.node() + step) % layer_.nodes();
    bool any = false;
    sources_.for_each_run_of(to, chunk, layer_.node(), [&](const Run& run) {
      any = true;
      for (std::int64_t first = run.first; first < run.last; first += kStagedTokens) {
        const std::int64_t count = std::min(kStagedTokens, run.last - first);
        for (std::int64_t i = 0; i < count; ++i) {
          sum(addends, add_node(to, first + i, addends), nullptr, staged_.data() + i * bytes);
        }
        layer_.rail.put_rows(to, first, staged_.data(), count, bytes);
      }
    });
    if (any) layer_.rail.send_chunk(to, chunk);
  }
}

// The tokens of this rank: the rows of its own node and the sums that other nodes have sent.
void Combine::finish_own(std::int64_t chunk) {
  const std::int64_t begin = chunk * kChunkTokens;
  const std::int64_t end = std::min(routing_.tokens, begin + kChunkTokens);
  const std::int64_t size = size_of(layer_.config.dtype);
  const std::size_t nodes = static_cast<std::size_t>(layer_.nodes());
  std::vector<bool> sent(nodes * kChunkTokens);  // [NN, kChunkTokens]: that node has a sum
  for (int node = 0; node < layer_.nodes(); ++node) {
    bool any = false;
    if (node == layer_.node()) continue;
    sources_.for_each_run_of(layer_.node(), chunk, node, [&](const Run& run) {
      any = true;
      const auto first = sent.begin() + node * kChunkTokens - begin;
      std::fill(first + run.first, first + run.last, true);
    });
    if (any) layer_.rail.wait_chunk(node, chunk, "the sums");
  }
  std::vector<Addend> addends(nodes + kMaxAddends);
  for (std::int64_t token = begin; token < end; ++token) {
    int count = 0;
    for (int node = 0; node < layer_.nodes(); ++node) {
      if (node == layer_.node()) {
        count += add_node(node, token, addends.data() + count);
      } else if (sent[std::size_t(node * kChunkTokens + token - begin)]) {
        addends[std::size_t(count++)] = {.row = layer_.rail.row(node, token, layer_.row_bytes()),
                                         .ends_rank = true,
                                         .ends_node = true};
      }
    }
    const void* bias = nullptr;
    if (args_.bias.present()) {
      bias = static_cast<const std::byte*>(args_.bias.data()) + token * args_.bias.stride(0) * size;
    }
    sum(addends.data(), count, bias,
        static_cast<std::byte*>(out_.data()) + token * out_.stride(0) * size);
  }
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

void check_combine(const Config& config, const std::shared_ptr<const char>& layer,
                   const CombineArgs& args, const Descriptor::State& state) {
  if (args.refusal != nullptr) throw *args.refusal;
  const Check check{std::string(kOperation)};
  check_descriptor(check, layer, state);
  const Dim hidden{"hidden", config.hidden};
  const std::int64_t tokens = state.routing->tokens;
  check.input("expert_output", args.expert_output, {{"rows", state.rows()}, hidden}, {config.dtype},
              config.device);
  const TensorView buffer = buffer_of(config, state);
  const bool dense = state.rows() <= 1 || args.expert_output.stride(0) == config.hidden;
  check.that(dense || !share_memory(args.expert_output, buffer), "expert_output",
             "dense rows where they lie in combine_buffer()", "others");  // it is copied there
  if (args.bias.present()) {
    check.input("bias", args.bias, {{"n", tokens}, hidden}, {config.dtype}, config.device);
  }
  if (args.out.present()) {
    check.output("out", args.out, {{"n", tokens}, hidden}, {config.dtype}, config.device);
    // Other ranks read the rows there while this one writes its sums.
    check.that(!share_memory(args.out, args.expert_output) && !share_memory(args.out, buffer),
               "out", "memory apart from expert_output and combine_buffer()", "some of theirs");
    const bool in_place = args.bias.present() && args.bias.data() == args.out.data() &&
                          (tokens <= 1 || args.bias.stride(0) == args.out.stride(0));
    check.that(!args.bias.present() || in_place || !share_memory(args.out, args.bias), "out",
               "memory apart from bias, or the same", "some of it");
  }
  if (!args.weighted) return;
  check.that(state.routing->order == RowOrder::expert_major, "weighted",
             "false in token-major order", "true");
  check.that(state.has_weights, "weighted", "weights that were sent at dispatch", "none");
}

Tensor combine(Layer& layer, const CombineArgs& args, const Descriptor& descriptor) {
  return layer.call(kOperation, [&] { return Combine(layer, args, descriptor).run(); });
}

}  // namespace winnow::expert_parallel
