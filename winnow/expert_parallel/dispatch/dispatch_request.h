// The arguments of one rank's dispatch, checked, and what they ask for. Internal.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/expert_parallel/dispatch/dispatch.h"
#include "winnow/expert_parallel/layer/descriptor_state.h"
#include "winnow/expert_parallel/layer/layer.h"

namespace winnow::expert_parallel {

inline constexpr std::string_view kDispatch = "expert_parallel::dispatch";
// That tables can count.
inline constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();

// What one rank's dispatch asks for, as check_request() found it.
struct Request {
  std::int64_t tokens = 0;  // n
  RowOrder order = RowOrder::expert_major;
  std::int64_t expert_alignment = 1, worst_case_rows = 0;
  DType input = DType::bf16;
  std::int64_t row_bytes = 0;    // of input
  std::int64_t scale_bytes = 0;  // of a row's scales; 0: none
  DType scale_dtype = DType::f32;
  bool weights = false, scatter = false, copy_out = false;
  std::shared_ptr<const Routing> cached;  // null: a new routing
  // On the CPU, for the rail peers: indices [n, K] i32, which a repeat leaves out, then weights
  // [n, K]. A snapshot: the caller's tensors are not looked at again.
  std::vector<std::byte> table;

  const std::int32_t* indices() const {
    return reinterpret_cast<const std::int32_t*>(table.data());
  }
  std::size_t indices_bytes(std::int64_t count, std::int64_t topk) const {
    return cached ? 0 : static_cast<std::size_t>(count * topk) * sizeof(std::int32_t);
  }
};

// Throws Error (invalid_argument) naming the argument, for this rank alone; contents of
// expert_indices are not judged. `layer` is the identity of the layer, `config` its sizes.
// The table is left empty.
Request check_request(const Config& config, const std::shared_ptr<const char>& layer,
                      const DispatchArgs& args);
// What the other ranks learn of it.
Header make_header(const Request& request, const DispatchArgs& args);
// A new routing with what is known of it before any count. `number`: of the dispatch.
std::shared_ptr<Routing> make_routing(const Request& request, const Config& config,
                                      const ExpertMap& map, std::uint64_t number);
// On the CPU.
std::vector<std::byte> make_table(const Request& request, const DispatchArgs& args);
// Throws, alike on every rank, where a rank gets more rows than tables can count. `rows` [W].
void check_row_counts(std::span<const std::int64_t> rows, RowOrder order, std::int64_t topk);
// The same where one gets more than its `out` has, which `header_of(rank)` says.
template <class HeaderOf>
void check_room(std::span<const std::int64_t> rows, const HeaderOf& header_of) {
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::int64_t room = header_of(static_cast<int>(rank)).out_rows;
    if (room < 0 || rows[rank] <= room) continue;
    throw Error(ErrorCode::invalid_argument, std::string(kDispatch), "out",
                std::to_string(rows[rank]) + " rows or more on rank " + std::to_string(rank),
                std::to_string(room));
  }
}

// What a dispatch returns, on either backend. `arrived` are the rows of this rank where they lie,
// null for what there is none of; tensor(data, dtype, shape) makes a tensor of one of them, empty
// of null.
struct ArrivedRows {
  void* payload = nullptr;
  void* weights = nullptr;
  void* scales = nullptr;
  void* ids = nullptr;
};
template <class MakeTensor>
Dispatched make_dispatched(Backend backend, const Request& request, const Config& config,
                           std::int64_t rows, const ArrivedRows& arrived, bool output_given,
                           const MakeTensor& tensor) {
  Dispatched result;
  result.backend = backend;
  if (!output_given) result.output = tensor(arrived.payload, request.input, {rows, config.hidden});
  result.weights = request.order == RowOrder::token_major
                       ? tensor(arrived.weights, config.weight_dtype, {rows, config.topk})
                       : tensor(arrived.weights, config.weight_dtype, {rows});
  const std::int64_t scales = request.scale_bytes / size_of(request.scale_dtype);
  result.scales = tensor(arrived.scales, request.scale_dtype, {rows, scales});
  result.expert_ids = tensor(arrived.ids, DType::i32, {rows, config.topk});
  return result;
}

// What the descriptor of a dispatch holds on either backend. `layer` is the identity of the layer,
// `number` that of the dispatch.
std::unique_ptr<Descriptor::State> make_state(std::shared_ptr<const void> layer, int rank,
                                              std::uint64_t number, const Request& request,
                                              std::shared_ptr<const Routing> routing,
                                              std::shared_ptr<Region> buffer,
                                              std::int64_t values_at);

}  // namespace winnow::expert_parallel
