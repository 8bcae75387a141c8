// Python binding of expert_parallel::Descriptor.
#include "winnow/expert_parallel/layer/descriptor_py.h"

#include "winnow/core/error.h"
#include "winnow/python/bindings.h"
#include "winnow/python/text.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

nb::object numbers(const ConstTensorView& view) {
  if (!view.present()) return nb::none();
  nb::list list;
  const auto* values = static_cast<const std::int32_t*>(view.data());
  for (std::int64_t i = 0; i < view.size(0); ++i) list.append(values[i]);
  return list;
}

const char* name_of(ep::RowOrder order) {
  return order == ep::RowOrder::expert_major ? "expert_major" : "token_major";
}

}  // namespace

std::shared_ptr<const ep::Descriptor> descriptor_argument(const char* operation,
                                                          const char* argument, nb::handle value) {
  // What dispatch() returns, for instance.
  const bool has_one =
      !value.is_none() && !nb::isinstance<BoundDescriptor>(value) &&
      nb::isinstance<BoundDescriptor>(nb::getattr(value, "descriptor", nb::none()));
  if (has_one) {
    const auto kind = text_of(value.type().attr("__name__"));
    throw Error(ErrorCode::invalid_argument, operation, argument, "a Descriptor",
                kind + ", whose .descriptor is one");
  }
  const auto* found = value_argument<BoundDescriptor*>(operation, argument, value);
  return found == nullptr ? nullptr : found->descriptor;
}

void bind_expert_parallel_descriptor(nb::module_& m) {
  using ep::Descriptor;
  const auto number = [](auto method) {
    return [method](const BoundDescriptor& self) { return ((*self.descriptor).*method)(); };
  };
  nb::class_<BoundDescriptor>(
      m, "Descriptor",
      "The routing of a dispatch, for its combine() and for a dispatch that repeats it.\n\n"
      "Any number may be alive, used in any order, by any thread; a descriptor may outlive the\n"
      "layer's close(). Tensors are of the kind of the dispatch's input, share the descriptor's\n"
      "memory and must not be written to; on a GPU they are filled in the order of its stream.\n"
      "\"Rail source j\" is the rank of node j with this rank's local index; NN = W / L nodes,\n"
      "R = rows.")
      .def_prop_ro("rows", number(&Descriptor::rows),
                   "R: rows of the output, padding included; worst_case_rows where that was given.")
      .def_prop_ro(
          "wanted_rows", number(&Descriptor::wanted_rows),
          "The rows that the routing asked for; more than R: some were dropped. -1 on a GPU with\n"
          "worst_case_rows: the host does not wait for it.")
      .def_prop_ro("wanted_rows_per_rank",
                   &BoundDescriptor::field<&Descriptor::wanted_rows_per_rank>,
                   "int64 [W]: the same of every rank, on the layer's device in every mode.")
      .def_prop_ro(
          "order", [](const BoundDescriptor& self) { return name_of(self.descriptor->order()); },
          "\"expert_major\" or \"token_major\".")
      .def_prop_ro("expert_alignment", number(&Descriptor::expert_alignment))
      .def_prop_ro("worst_case_rows", number(&Descriptor::worst_case_rows), "0: none was given.")
      .def_prop_ro("has_weights", number(&Descriptor::has_weights),
                   "Whether weights came with the tokens, so that combine() may be weighted.")
      .def_prop_ro("num_dispatch_token_cur_rank", number(&Descriptor::num_dispatch_token_cur_rank),
                   "n: tokens that this rank dispatched.")
      .def_prop_ro("num_input_tokens_per_rank",
                   &BoundDescriptor::field<&Descriptor::num_input_tokens_per_rank>,
                   "int32 [W]: n of every rank.")
      .def_prop_ro("source_begins", &BoundDescriptor::field<&Descriptor::source_begins>,
                   "int32 [W + 1] in token-major order, else None: where the rows of each source "
                   "rank\nbegin here, and where those of the last one end; cut at worst_case_rows.")
      .def_prop_ro("send_reqs_recv", &BoundDescriptor::field<&Descriptor::send_reqs_recv>,
                   "int32 [NN, 2, T], None on one node: first and end of the runs of tokens that "
                   "rail\nsource j sent to this node, a run that begins in the 64 tokens from t on "
                   "in slot t or\nlater; -1 elsewhere.")
      .def_prop_ro("topk_indices", &BoundDescriptor::field<&Descriptor::topk_indices>,
                   "int32 [NN, T, K]: the expert indices of rail source j; -1 beyond its n tokens.")
      .def_prop_ro(
          "token_dst_scatter_idx", &BoundDescriptor::field<&Descriptor::token_dst_scatter_idx>,
          "int32 [NN, T, K]: the row of pair (t, k) of rail source j at the expert's rank; "
          "-1\nwhere that rank is on another node, for dropped pairs and beyond n.")
      .def_prop_ro("skipped_token_mapping_indices",
                   &BoundDescriptor::field<&Descriptor::skipped_token_mapping_indices>,
                   "int64 [R]: the row of the first pair of the same token here; -1 for padding.")
      .def_prop_ro("skipped_token_topk_mapping_indices",
                   &BoundDescriptor::field<&Descriptor::skipped_token_topk_mapping_indices>,
                   "int64 [R, K]: for a token's first row the row of each pair here, else -1.")
      .def_prop_ro("expert_counts", &BoundDescriptor::field<&Descriptor::expert_counts>,
                   "int32 [E/W]: pairs of each local expert, without padding and before rows were "
                   "dropped.")
      .def_prop_ro("expert_offsets", &BoundDescriptor::field<&Descriptor::expert_offsets>,
                   "int32 [E/W + 1]: where each local expert's rows begin, padding included. With\n"
                   "worst_case_rows they are not cut at R: after an overflow they lie beyond it.\n"
                   "In token-major order the exclusive sums of expert_counts.")
      .def_prop_ro(
          "host_expert_counts",
          [](const BoundDescriptor& self) {
            return numbers(self.descriptor->host_expert_counts());
          },
          "expert_counts as a list; None on a GPU with worst_case_rows.",
          nb::for_getter(nb::sig("def host_expert_counts(self) -> list[int] | None")))
      .def_prop_ro(
          "host_expert_offsets",
          [](const BoundDescriptor& self) {
            return numbers(self.descriptor->host_expert_offsets());
          },
          "expert_offsets as a list; None on a GPU with worst_case_rows.",
          nb::for_getter(nb::sig("def host_expert_offsets(self) -> list[int] | None")));
}

}  // namespace winnow::python
