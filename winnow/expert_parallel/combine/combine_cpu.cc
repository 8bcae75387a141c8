#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "winnow/core/interrupt.h"
#include "winnow/cpu/convert.h"
#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/combine/combine_row_sum.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/rail_weights.h"
#include "winnow/expert_parallel/routing/rail_sources.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = kCombine;

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
  Extent place_pair_values() const;
  void find_rows();
  void reduce_for_others(std::int64_t chunk);
  void finish_own(std::int64_t chunk);
  void collect_values(int node, std::int64_t token, std::byte* to) const;
  void add_values(int node, std::int64_t token, float* sums) const;
  void finish_values(std::int64_t token) const;
  void take_values(int node, std::int64_t token, std::byte* to, float* sums) const;
  int add_node(int node, std::int64_t token, Addend* addends) const;
  void sum(const Addend* addends, int count, void* to, std::int64_t own_token = -1) const;
  bool has_rows() const { return args_.expert_output.present(); }
  bool has_values() const { return args_.pair_values.present(); }
  std::int64_t value_bytes() const { return size_of(layer_.config.weight_dtype); }
  std::int64_t values_row_bytes() const { return routing_.topk * value_bytes(); }
  const std::byte* value_of(int node, std::int64_t token, int k) const;

  Layer& layer_;
  const CombineArgs& args_;
  const Descriptor::State& state_;
  const Routing& routing_;
  RailSources sources_;
  Tensor result_;  // unless the caller gave its own
  TensorView out_;
  std::vector<const std::byte*> rows_;    // [L] the expert rows of each rank of this node
  std::vector<const std::byte*> values_;  // [L] the values of their pairs
  std::vector<float> weights_;            // [NN, T, K] that were given here
  std::vector<std::byte> staged_;         // [kStagedTokens, H] sums for another node
  std::vector<std::byte> staged_values_;  // [kStagedTokens, K]
  Interrupts interrupts_;
};

// Says where this rank's expert rows are, or what is wrong, and receives the same from all.
void Combine::post() {
  Header header;
  std::vector<std::byte> table;  // weights, for the rail peers
  header.refuse_what_throws(kOperation, [&] {
    check_combine(layer_.config, layer_.identity, args_, state_);
    header.options = combine_options(args_, state_);
    if (args_.weights.present()) append_rows(table, args_.weights);
    if (has_rows()) header.rows = place_expert_output();
    if (has_values()) header.values = place_pair_values();
    out_ = args_.out;
    if (!out_.present() && has_rows()) {
      result_ = Tensor(layer_.config.dtype, {routing_.tokens, layer_.config.hidden});
      out_ = result_;
    }
    if (layer_.nodes() == 1) return;
    staged_.resize(std::size_t(kStagedTokens * layer_.row_bytes()));
    staged_values_.resize(std::size_t(kStagedTokens * values_row_bytes()));
  });
  layer_.meet(kOperation, "the expert rows", header, nullptr, table);
  layer_.exchange.throw_refusals(kOperation);
  if (!args_.weights.present()) return;
  const DType dtype = layer_.config.weight_dtype;
  weights_ = to_floats(dtype, rail_weights(layer_, routing_, sources_, table.data(),
                                           [](std::int64_t) { return std::size_t{0}; }));
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

// Copies the values to where the other ranks of this node read them.
Extent Combine::place_pair_values() const {
  const ConstTensorView& values = args_.pair_values;
  const std::int64_t row = values.rank() == 2 ? values_row_bytes() : value_bytes();
  const auto* from = static_cast<const std::byte*>(values.data());
  std::byte* to = state_.buffer->data() + state_.values_at;
  for (std::int64_t i = 0; i < values.size(0); ++i) {
    std::memcpy(to + i * row, from + i * values.stride(0) * value_bytes(),
                static_cast<std::size_t>(row));
  }
  Extent extent = state_.buffer->extent();
  extent.offset += state_.values_at;
  return extent;
}

void Combine::find_rows() {
  const Topology& topology = layer_.map.topology;
  const std::int64_t values_bytes =
      routing_.order == RowOrder::token_major ? values_row_bytes() : value_bytes();
  for (int local = 0; local < topology.local_world_size; ++local) {
    const int rank = topology.rank(layer_.node(), local);
    const auto find = [&](const Extent& extent, std::int64_t row_bytes, std::string_view what) {
      layer_.check_extent(rank, {extent.segment, extent.offset, routing_.rows_of(rank) * row_bytes},
                          what);
      SymmetricMemory& memory = layer_.arena.memory(extent.segment);
      return layer_.communicator.node_pointer(memory, local) + extent.offset;
    };
    const Header& header = layer_.exchange.header(rank);
    if (has_rows()) rows_.push_back(find(header.rows, layer_.row_bytes(), "where the rows are"));
    if (has_values()) values_.push_back(find(header.values, values_bytes, "where the values are"));
  }
}

// Of a rail source's pair on this node; null where it has no row here.
const std::byte* Combine::value_of(int node, std::int64_t token, int k) const {
  const std::size_t pair = sources_.pair(node, token) + std::size_t(k);
  const std::int64_t row = routing_.rows[pair];
  if (row < 0) return nullptr;
  const int local = layer_.map.topology.local(layer_.map.rank_of(routing_.indices[pair]));
  const bool token_major = routing_.order == RowOrder::token_major;
  return values_[std::size_t(local)] +
         (token_major ? row * routing_.topk + k : row) * value_bytes();
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
    if (!weights_.empty()) addends[at].weight = weights_[pair + std::size_t(k)];
    ++count;
  }
  for (int i = 0; i < count; ++i) {
    addends[i].ends_node = i + 1 == count;
    addends[i].ends_rank = i + 1 == count || locals[i] != locals[i + 1];
    addends[i].round_rank = layer_.config.enable_local_combine && weights_.empty() &&
                            locals[i] != layer_.communicator.local();
  }
  return count;
}

// `own_token`: this rank's, to which the biases are added; -1: a partial sum.
void Combine::sum(const Addend* addends, int count, void* to, std::int64_t own_token) const {
  static const auto sum_rows = cpu_kernels().expert_parallel_sum_rows;
  const auto row_of = [&](const ConstTensorView& bias) -> const std::byte* {
    if (own_token < 0 || !bias.present()) return nullptr;
    return static_cast<const std::byte*>(bias.data()) +
           own_token * bias.stride(0) * size_of(bias.dtype());
  };
  sum_rows({.dtype = layer_.config.dtype,
            .hidden = layer_.config.hidden,
            .addends = addends,
            .count = count,
            .weighted = args_.weighted || !weights_.empty(),
            .bias = row_of(args_.bias),
            .second_bias = row_of(args_.second_bias),
            .to = to});
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
          interrupts_.look();
          if (has_rows()) {
            sum(addends, add_node(to, first + i, addends), staged_.data() + i * bytes);
          }
          if (has_values()) {
            collect_values(to, first + i, staged_values_.data() + i * values_row_bytes());
          }
        }
        if (has_rows()) layer_.rail.put_rows(to, first, staged_.data(), count, bytes);
        if (has_values()) {
          layer_.rail.put_scales(to, first, staged_values_.data(), count, values_row_bytes());
        }
      }
    });
    if (any) layer_.rail.send_chunk(to, chunk);
  }
}

// The values of a rail source's token on this node: [K], 0 for pairs without one.
void Combine::collect_values(int node, std::int64_t token, std::byte* to) const {
  if (args_.add_values) {
    float sums[kMaxTopk] = {};
    add_values(node, token, sums);
    store_f32(layer_.config.weight_dtype, sums, routing_.topk, to, 0);
    return;
  }
  for (int k = 0; k < routing_.topk; ++k, to += value_bytes()) {
    const std::byte* value = value_of(node, token, k);
    value ? std::memcpy(to, value, std::size_t(value_bytes()))
          : std::memset(to, 0, std::size_t(value_bytes()));
  }
}

// Adds those of all rows of the token on this node, ranks ascending.
void Combine::add_values(int node, std::int64_t token, float* sums) const {
  const std::size_t pair = sources_.pair(node, token);
  for (std::size_t local = 0; local < values_.size(); ++local) {
    for (int k = 0; k < routing_.topk; ++k) {
      const std::int32_t row = routing_.rows[pair + std::size_t(k)];
      if (row < 0) continue;
      const int home = layer_.map.rank_of(routing_.indices[pair + std::size_t(k)]);
      if (layer_.map.topology.local(home) != static_cast<int>(local)) continue;
      float values[kMaxTopk];
      load_f32(layer_.config.weight_dtype, values_[local], std::int64_t(row) * routing_.topk,
               routing_.topk, values);
      for (int i = 0; i < routing_.topk; ++i) sums[i] += values[i];
      break;
    }
  }
}

// Those of this rank's token: of each pair what its expert's node has said; or of all nodes added.
void Combine::finish_values(std::int64_t token) const {
  const TensorView& out = args_.pair_values_out;
  std::byte* to =
      static_cast<std::byte*>(out.data()) + token * out.stride(0) * size_of(out.dtype());
  if (!args_.add_values) collect_values(layer_.node(), token, to);
  float total[kMaxTopk] = {};
  for (int node = 0; node < layer_.nodes(); ++node) {
    float sums[kMaxTopk] = {};
    if (node == layer_.node()) {
      if (args_.add_values) add_values(node, token, sums);
    } else {
      take_values(node, token, to, sums);
    }
    for (int k = 0; k < routing_.topk; ++k) total[k] += sums[k];
  }
  if (args_.add_values) store_f32(layer_.config.weight_dtype, total, routing_.topk, to, 0);
}

// What another node has sent of this rank's token.
void Combine::take_values(int node, std::int64_t token, std::byte* to, float* sums) const {
  const std::int32_t* experts = routing_.indices.data() + sources_.pair(layer_.node(), token);
  bool any = false;
  for (int k = 0; k < routing_.topk; ++k) {
    if (layer_.map.node_of(experts[k]) != node) continue;
    any = true;
    if (args_.add_values) break;
    std::memcpy(to + k * value_bytes(),
                layer_.rail.scale(node, token, values_row_bytes()) + k * value_bytes(),
                std::size_t(value_bytes()));
  }
  if (!any || !args_.add_values) return;
  load_f32(layer_.config.weight_dtype, layer_.rail.scale(node, token, values_row_bytes()), 0,
           routing_.topk, sums);
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
    interrupts_.look();
    if (has_values()) finish_values(token);
    if (!has_rows()) continue;
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
    sum(addends.data(), count, static_cast<std::byte*>(out_.data()) + token * out_.stride(0) * size,
        token);
  }
}

}  // namespace

Tensor combine(Layer& layer, const CombineArgs& args, const Descriptor& descriptor) {
  return layer.call(kOperation, [&] { return Combine(layer, args, descriptor).run(); });
}

}  // namespace winnow::expert_parallel
