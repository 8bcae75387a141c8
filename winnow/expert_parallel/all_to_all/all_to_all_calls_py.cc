#include "winnow/expert_parallel/all_to_all/all_to_all_calls_py.h"

#include <algorithm>
#include <span>

#include <nanobind/stl/string.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/python/framework.h"

namespace winnow::python {
namespace {

constexpr const char* kDispatch = "expert_parallel::dispatch";
constexpr const char* kCombine = "expert_parallel::combine";

ep::RowOrder order_argument(nb::handle order) {
  std::string name;
  if (nb::try_cast(order, name)) {
    if (name == "expert_major") return ep::RowOrder::expert_major;
    if (name == "token_major") return ep::RowOrder::token_major;
  }
  refuse_argument(kDispatch, "order", "expert_major or token_major", order);
}

// torch has every dtype, and its allocator knows streams.
bool is_torch_tensor(nb::handle object) {
  const nb::object torch = imported("torch");
  return torch.is_valid() && nb::isinstance(object, torch.attr("Tensor"));
}

// A result that a call has made in the memory of the caller's framework.
struct MadeTensor {
  TensorView view;
  nb::object object;

  // Tensors without elements may all lie at the same address.
  bool is(const ConstTensorView& other) const {
    return view.data() == other.data() && view.dtype() == other.dtype() &&
           std::ranges::equal(view.shape(), other.shape());
  }
};
using MadeTensors = std::vector<MadeTensor>;

// For results with copy_out: tensors of the framework of the call's inputs. The library holds none
// of them: they live in `made` until they are returned.
auto allocator(Call& call, MadeTensors& made) {
  return [&](DType dtype, std::span<const std::int64_t> shape) {
    const Locked locked;
    nb::object object = nb::none();
    const TensorView view = shape.size() == 1
                                ? call.output("output", object, dtype, {shape[0]})
                                : call.output("output", object, dtype, {shape[0], shape[1]});
    made.push_back({view, object});
    static const auto nobody = std::make_shared<const char>('\0');
    return Tensor::borrow(nobody, view.data(), dtype, view.shape(), view.device());
  };
}

}  // namespace

void make_layer(nb::pointer_and_handle<BoundAllToAll> self,
                std::shared_ptr<ep::Transport> transport, nb::handle store, nb::handle max_tokens,
                nb::handle hidden, nb::handle topk, nb::handle experts, nb::handle dtype,
                nb::handle weight_dtype, nb::handle local_world_size,
                nb::handle enable_local_combine, nb::handle sm_count, nb::handle arena_rows,
                nb::handle timeout, nb::handle device) {
  ep::Config config;
  make_on_all_ranks(
      "expert_parallel::AllToAll", self.p, std::move(transport), store, config, timeout, device,
      Option{config.dtype, "dtype", dtype},
      Option{config.weight_dtype, "weight_dtype", weight_dtype},
      Option{config.local_world_size, "local_world_size", local_world_size},
      Option{config.enable_local_combine, "enable_local_combine", enable_local_combine},
      Option{config.sm_count, "sm_count", sm_count},
      Option{config.arena_rows, "arena_rows", arena_rows},
      Option{config.max_tokens, "max_tokens", max_tokens}, Option{config.hidden, "hidden", hidden},
      Option{config.topk, "topk", topk}, Option{config.experts, "experts", experts});
  // In the object's own dictionary, where torch.compile can read it: number, W, NN, T, K, E / W.
  const ep::Topology& topology = self.p->layer.topology();
  self.h.attr("_traced") =
      nb::make_tuple(self.p->number.give(self.h), topology.world_size, topology.nodes(),
                     config.max_tokens, config.topk, config.experts / topology.world_size);
}

BoundDispatched dispatch(BoundAllToAll& self, nb::handle input, nb::handle expert_indices,
                         const nb::args& extra, nb::handle weights, nb::handle scales,
                         nb::handle scatter_indices, nb::handle order, nb::handle expert_alignment,
                         nb::handle worst_case_rows, nb::handle copy_out, nb::handle cached,
                         nb::handle out, nb::handle sm_count, nb::handle stream,
                         const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kDispatch);
  Call call(kDispatch);
  call.on(self.layer.config().device);
  ep::DispatchArgs args;
  Exporter exporter;
  MadeTensors made;
  const std::exception_ptr refused = caught([&] {
    Signature(kDispatchDeclared).check(extra, unknown);
    call.use_stream(stream);
    args = {.input = call.input("input", input),
            .expert_indices = call.input("expert_indices", expert_indices),
            .weights = call.input("weights", weights),
            .scales = call.input("scales", scales),
            .scatter_indices = call.input("scatter_indices", scatter_indices),
            .order = order_argument(order),
            .expert_alignment =
                value_argument<std::int64_t>(kDispatch, "expert_alignment", expert_alignment),
            .worst_case_rows =
                value_argument<std::int64_t>(kDispatch, "worst_case_rows", worst_case_rows),
            .copy_out = value_argument<bool>(kDispatch, "copy_out", copy_out),
            .out = call.in_out("out", out),
            .sm_count = value_argument<int>(kDispatch, "sm_count", sm_count),
            .cached = descriptor_argument(kDispatch, "cached", cached)};
    exporter = call.exporter();
    if (args.copy_out && is_torch_tensor(input)) args.allocate = allocator(call, made);
  });
  ep::Dispatched got;
  bool recorded = false;
  run_collective(kDispatch, refused, args, [&] {
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      got = self.layer.dispatch(args);
      recorded = in_capture(self.layer.config().device, args.stream);
    });
  });
  const auto give = [&](Tensor& tensor) {
    const ConstTensorView view = tensor.view();
    for (const MadeTensor& own : made) {
      if (view.present() && own.is(view)) return nb::borrow<nb::any>(own.object);
    }
    return nb::borrow<nb::any>(exporter(std::move(tensor)));
  };
  const auto written = [&] {
    const std::int64_t rows = got.descriptor->rows();
    return args.out.size(0) == rows ? nb::borrow(out)
                                    : out[nb::slice(nb::int_(0), nb::int_(rows), nb::none())];
  };
  BoundDispatched result{
      .output = out.is_none() ? give(got.output) : nb::borrow<nb::any>(written()),
      .weights = give(got.weights),
      .scales = give(got.scales),
      .expert_ids = give(got.expert_ids),
      .descriptor = nb::cast(BoundDescriptor{std::move(got.descriptor), exporter})};
  if (recorded) self.recorded.push_back(nb::cast(result));
  return result;
}

void refuse_dispatch(BoundAllToAll& self, const std::string& text) {
  refuse_on_all_ranks<ep::DispatchArgs>(
      kDispatch, self, text, [&](const ep::DispatchArgs& args) { self.layer.dispatch(args); });
}

void refuse_combine(BoundAllToAll& self, const std::string& text) {
  refuse_on_all_ranks<ep::CombineArgs>(
      kCombine, self, text, [&](const ep::CombineArgs& args) { self.layer.combine(args, {}); });
}

nb::object combine(BoundAllToAll& self, nb::handle expert_output, nb::handle descriptor,
                   const nb::args& extra, nb::handle bias, nb::handle second_bias,
                   nb::handle weighted, nb::handle weights, nb::handle pair_values,
                   nb::handle add_values, nb::handle pair_columns, nb::object out,
                   nb::handle sm_count, nb::handle stream, const nb::kwargs& unknown) {
  const OneCall::Turn turn(self.one_call, kCombine);
  Call call(kCombine);
  call.on(self.layer.config().device);
  ep::CombineArgs args;
  std::shared_ptr<const ep::Descriptor> made;
  nb::object values = nb::none();
  bool recorded = false;
  const std::exception_ptr refused = caught([&] {
    Signature(kCombineDeclared).check(extra, unknown);
    made = descriptor_argument(kCombine, "descriptor", descriptor);
    if (made == nullptr) refuse_argument(kCombine, "descriptor", "a Descriptor", descriptor);
    call.use_stream(stream);
    args.expert_output = call.input("expert_output", expert_output);
    args.bias = call.input("bias", bias);
    args.second_bias = call.input("second_bias", second_bias);
    args.weights = call.input("weights", weights);
    args.pair_values = call.input("pair_values", pair_values);
    args.weighted = value_argument<bool>(kCombine, "weighted", weighted);
    args.add_values = value_argument<bool>(kCombine, "add_values", add_values);
    args.pair_columns = value_argument<std::int64_t>(kCombine, "pair_columns", pair_columns);
    args.sm_count = value_argument<int>(kCombine, "sm_count", sm_count);
    // Rows of another dtype are the library's to refuse: their framework may not have the layer's.
    const ep::Config& config = self.layer.config();
    const std::int64_t tokens = made->num_dispatch_token_cur_rank();
    if ((args.expert_output.present() && args.expert_output.dtype() == config.dtype) ||
        !out.is_none()) {
      args.out = call.output("out", out, config.dtype, {tokens, config.hidden});
    }
    if (args.pair_values.present() && args.pair_values.dtype() == config.weight_dtype) {
      args.pair_values_out =
          call.output("pair_values_out", values, config.weight_dtype, {tokens, config.topk});
    }
  });
  const ep::Descriptor none;
  run_collective(kCombine, refused, args, [&] {
    call.run([&](const RunOptions& options) {
      args.stream = options.stream;
      self.layer.combine(args, made == nullptr ? none : *made);
      recorded = in_capture(self.layer.config().device, args.stream);
    });
  });
  if (recorded) self.recorded.push_back(nb::borrow(descriptor));
  if (!args.pair_values.present()) return out;
  return nb::make_tuple(out, values);
}

nb::object combine_buffer(BoundAllToAll& self, const BoundDescriptor& descriptor) {
  const OneCall::Turn turn(self.one_call, "expert_parallel::combine_buffer");
  return descriptor.exporter(self.layer.combine_buffer(*descriptor.descriptor),
                             descriptor.descriptor);
}

void barrier(BoundAllToAll& self, nb::handle intra_node_only, nb::handle stream) {
  constexpr const char* operation = "expert_parallel::barrier";
  const OneCall::Turn turn(self.one_call, operation);
  Call call(operation);
  call.on(self.layer.config().device);
  bool of_node = false;
  const std::exception_ptr refused = caught([&] {
    of_node = value_argument<bool>(operation, "intra_node_only", intra_node_only);
    call.use_stream(stream);
  });
  run_collective(refused, [&] {
    call.run([&](const RunOptions& options) { self.layer.barrier(of_node, options.stream); });
  });
}

void close(BoundAllToAll& self) {
  const OneCall::Turn turn(self.one_call, "expert_parallel::close");
  {
    const Unlocked unlocked;
    self.layer.close();
  }
  self.recorded.clear();
}

}  // namespace winnow::python
