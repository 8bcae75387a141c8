// combine() on a GPU: what is enqueued, in which order.
#include <algorithm>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/combine/combine_impl.h"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/exchange/rail_cuda.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"
#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::string_view kOperation = kCombine;

// One rank's part of one combine; the counterpart of Combine in combine_cpu.cc.
class CudaCombine {
 public:
  CudaCombine(CudaLayer& layer, const CombineArgs& args, const Descriptor& descriptor)
      : layer_(layer),
        place_(layer.place()),
        handshake_(layer.handshake()),
        calls_(layer.calls()),
        args_(args),
        state_(descriptor.state()),
        routing_(*state_.routing) {}

  Tensor run() {
    layer_.begin(kOperation, args_.stream, args_.sm_count);
    post();
    if (args_.weights.present()) take_weights();
    if (place_.nodes() > 1) {
      if (has_values()) carry_values(kOthers);
      if (has_rows()) sum(kOthers);
      send_back();
    }
    // Where the sums tell the node that this rank has read its memory, the values are read before.
    const bool first = has_rows() && sums_.travel == Travel::rows_are_read;
    if (has_values() && first) carry_values(kOwn);
    if (has_rows()) sum(kOwn);
    if (has_values() && !first) carry_values(kOwn);
    layer_.quiet();
    layer_.end();
    return std::move(result_);
  }

 private:
  void post();
  Extent place_expert_output();
  Extent place_pair_values();
  const std::byte* place_weights();
  void take_weights();
  void carry_values(Part part);
  bool has_rows() const { return args_.expert_output.present(); }
  bool has_values() const { return args_.pair_values.present(); }
  std::int64_t pair_row_bytes() const {
    return place_.config.topk * size_of(place_.config.weight_dtype);
  }
  void make_out();
  Travel travel() const;
  void fill_params();
  void sum(Part part);
  void send_back();

  CudaLayer& layer_;
  const Place& place_;
  Handshake& handshake_;
  CudaCalls& calls_;
  const CombineArgs& args_;
  const Descriptor::State& state_;
  const Routing& routing_;
  Tensor result_;  // unless the caller gave its own
  TensorView out_;
  CudaSumParams sums_;
};

// Says where this rank's expert rows are, or what is wrong.
void CudaCombine::post() {
  Header header;
  header.options.call = Call::combine;
  const std::byte* table = nullptr;  // weights, for the rail peers
  std::int64_t table_bytes = 0;
  header.refuse_what_throws(kOperation, [&] {
    check_combine(place_.config, layer_.identity(), args_, state_);
    header.options = combine_options(args_, state_);
    if (has_rows()) make_out();
    fill_params();
    if (has_rows()) header.rows = place_expert_output();
    if (has_values()) header.values = place_pair_values();
    if (args_.weights.present() && place_.nodes() > 1) {
      table = place_weights();
      table_bytes = routing_.tokens * pair_row_bytes();
    }
  });
  handshake_.exchange(kExpertRowsPhase, header, nullptr, table, table_bytes, Report::none);
  if (header.refusal != 0) handshake_.wait_report();
}

void CudaCombine::make_out() {
  out_ = args_.out;
  if (out_.present()) return;
  const std::int64_t hidden = place_.config.hidden;
  const auto memory = layer_.keep(routing_.tokens * place_.row_bytes());
  result_ = Tensor::borrow(memory, memory->data(), place_.config.dtype, {routing_.tokens, hidden},
                           place_.device());
  out_ = result_;
}

// Where in the arena the rows are for others to read, which is where they are copied unless they
// are there; nowhere if only this rank reads them. As bulk copies need them, in any case.
Extent CudaCombine::place_expert_output() {
  const ConstTensorView& rows = args_.expert_output;
  const std::int64_t count = rows.size(0), bytes = place_.row_bytes();
  const std::int64_t stride = count > 1 ? rows.stride(0) * size_of(rows.dtype()) : bytes;
  sums_.expert_rows = static_cast<const std::byte*>(rows.data());
  sums_.expert_stride = stride;
  const auto address = reinterpret_cast<std::uintptr_t>(rows.data());
  if (address % 16 == 0 && stride % 16 == 0) {
    const Extent found =
        stride == bytes ? layer_.regions().arena().locate(rows.data(), count * bytes) : Extent{};
    if (found.segment >= 0) return found;
    const bool others_read = sums_.travel == Travel::rows_are_read && place_.locals() > 1;
    if (!others_read) return {};
  }
  calls_.check(copy_rows(state_.buffer->data(), bytes, sums_.expert_rows, stride, bytes, count,
                         calls_.stream()),
               "the copy of expert_output");
  sums_.expert_rows = state_.buffer->data();
  sums_.expert_stride = bytes;
  return state_.buffer->extent();
}

// Copies the values to where the other ranks of this node read them.
Extent CudaCombine::place_pair_values() {
  const ConstTensorView& values = args_.pair_values;
  std::byte* to = state_.buffer->data() + state_.values_at;
  const std::int64_t row = values.rank() == 2 ? pair_row_bytes() : size_of(values.dtype());
  std::int64_t rows = values.size(0), bytes = row, stride = row_stride(values);
  if (stride == row) bytes *= std::exchange(rows, 1);
  calls_.check(copy_rows(to, bytes, static_cast<const std::byte*>(values.data()), stride, bytes,
                         bytes > 0 ? rows : 0, calls_.stream()),
               "the copy of pair_values");
  Extent extent = state_.buffer->extent();
  extent.offset += state_.values_at;
  return extent;
}

// [n, K], dense.
const std::byte* CudaCombine::place_weights() {
  const auto* from = static_cast<const std::byte*>(args_.weights.data());
  const std::int64_t row = pair_row_bytes();
  if (routing_.tokens <= 1 || row_stride(args_.weights) == row) return from;
  const Config& config = place_.config;
  auto* to = reinterpret_cast<std::byte*>(layer_.combine_weights() +
                                          place_.nodes() * config.max_tokens * config.topk);
  calls_.check(
      copy_rows(to, row, from, row_stride(args_.weights), row, routing_.tokens, calls_.stream()),
      "the copy of weights");
  return to;
}

void CudaCombine::take_weights() {
  WeightParams params;
  params.view = sums_.view;
  params.dtype = place_.config.weight_dtype;
  params.max_tokens = place_.config.max_tokens;
  params.tokens = routing_.tokens;
  params.rail_tokens = routing_.tables.tokens;
  params.weights = static_cast<const std::byte*>(args_.weights.data());
  params.stride = row_stride(args_.weights);
  params.pairs = layer_.combine_weights();
  calls_.check(launch_weights(params, layer_.blocks(), calls_.stream()), "weights");
}

void CudaCombine::carry_values(Part part) {
  const TensorView& out = args_.pair_values_out;
  ValueParams params;
  params.view = sums_.view;
  params.routing = routing_.tables;
  params.token_major = sums_.token_major;
  params.adds = args_.add_values;
  params.finishes = !has_rows() || sums_.travel != Travel::rows_are_read;
  params.dtype = place_.config.weight_dtype;
  params.max_tokens = sums_.max_tokens;
  params.tokens = routing_.tokens;
  params.out = static_cast<std::byte*>(out.data());
  params.out_stride = row_stride(out);
  calls_.check(launch_values(part, params, layer_.blocks(), calls_.stream()), "values");
}

Travel CudaCombine::travel() const {
  const Config& config = place_.config;
  if (sums_.token_major) {
    const auto& tokens = routing_.tokens_per_rank;  // empty where the host does not know them
    const std::int64_t most =
        tokens.empty() ? config.max_tokens : *std::ranges::max_element(tokens);
    return layer_.pushes_rows(most) ? Travel::rows_are_pushed : Travel::rows_are_read;
  }
  const bool sums = config.enable_local_combine && !args_.weights.present() && place_.locals() > 1;
  return sums ? Travel::sums_are_pushed : Travel::rows_are_read;
}

void CudaCombine::fill_params() {
  const Config& config = place_.config;
  const std::int64_t size = size_of(config.dtype);
  sums_.view = layer_.view();
  sums_.dtype = config.dtype;
  sums_.row_bytes = place_.row_bytes();
  sums_.routing = routing_.tables;
  if (args_.weighted) sums_.weights = state_.cuda_weights;
  if (args_.weights.present()) {
    sums_.weights.pairs = layer_.combine_weights();
    sums_.weights_are_new = true;
  }
  sums_.token_major = routing_.order == RowOrder::token_major;
  sums_.travel = travel();
  sums_.max_tokens = config.max_tokens;
  sums_.tokens = routing_.tokens;
  if (args_.bias.present()) {
    sums_.bias = static_cast<const std::byte*>(args_.bias.data());
    sums_.bias_stride = args_.bias.stride(0) * size;
  }
  if (args_.second_bias.present()) {
    sums_.second_bias = static_cast<const std::byte*>(args_.second_bias.data());
    sums_.second_bias_stride = args_.second_bias.stride(0) * size;
  }
  if (!has_rows()) return;
  sums_.out = static_cast<std::byte*>(out_.data());
  sums_.out_stride = out_.stride(0) * size;
}

void CudaCombine::sum(Part part) {
  int blocks = layer_.blocks();
  if (sums_.travel == Travel::rows_are_pushed) {
    constexpr int kEnough = 9;  // an SM pushes 42 GB/s, and 370 fill the links of an H200
    const int pushing = std::clamp(blocks / 2, 1, kEnough);
    calls_.check(launch_push_rows(part, sums_, pushing, calls_.stream()), "push_rows");
    blocks = std::max(1, blocks - pushing);
  }
  calls_.check(launch_sums(part, sums_, blocks, calls_.stream()), "sums");
}

void CudaCombine::send_back() {
  RailSendParams params;
  params.view = sums_.view;
  params.placed = sums_.routing.placed;
  params.back = true;
  params.indices = sums_.routing.indices;
  params.rail_tokens = sums_.routing.tokens;
  params.row_bytes = has_rows() ? sums_.row_bytes : 0;
  params.scale_bytes = has_values() ? pair_row_bytes() : 0;
  layer_.rail_send(params);
}

}  // namespace

Tensor combine(CudaLayer& layer, const CombineArgs& args, const Descriptor& descriptor) {
  return CudaCombine(layer, args, descriptor).run();
}

namespace {

int load() {
  for (const auto load_one : {load_push_rows, load_sums, load_values}) {
    if (const int status = load_one(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

constexpr PhaseText kTexts[] = {{kExpertRowsPhase, kOperation, "the expert rows"},
                                {kPushedRowsPhase, kOperation, "the expert rows"},
                                {kSumsPhase, kOperation, "the sums"},
                                {kPushedSumsPhase, kOperation, "the sums"},
                                {kEndOfSumsPhase, kOperation, "the end of the sums"}};

}  // namespace

CudaOperation cuda_combine() { return {load, kTexts}; }

}  // namespace winnow::expert_parallel
