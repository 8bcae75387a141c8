// Python bindings of the sizes of records and queue buffers.
#include <string>

#include <nanobind/stl/string.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/queue_buffers/queue_buffers.h"
#include "winnow/python/bindings.h"
#include "winnow/python/signature.h"

namespace winnow::python {
namespace {

namespace ep = expert_parallel;

template <ep::BufferLayout (*kLayout)(const ep::QueueShape&)>
ep::BufferLayout buffer_layout(std::int64_t bytes_per_token, std::int64_t recv_tokens,
                               std::int64_t nodes, std::int64_t local_world_size,
                               std::int64_t channels) {
  return kLayout({bytes_per_token, recv_tokens, nodes, local_world_size, channels});
}

ep::CleanMeta classic_clean_meta(const std::string& route, std::int64_t bytes_per_token,
                                 std::int64_t recv_tokens, std::int64_t nodes,
                                 std::int64_t local_world_size, std::int64_t channels) {
  const bool between = route == "between_nodes";
  if (!between && route != "inside_node") {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::classic_clean_meta", "route",
                "between_nodes or inside_node", route);
  }
  return ep::classic_clean_meta(
      between ? ep::QueueRoute::between_nodes : ep::QueueRoute::inside_node,
      {bytes_per_token, recv_tokens, nodes, local_world_size, channels});
}

constexpr const char* kRecordDoc = R"(Bytes of one token's record between ranks.

    payload | source meta | scales f32 | expert indices i32 | weights f32, rounded up to 16

Raises:
    ValueError: a negative number, local_world_size below 1, a result beyond 63 bits.)";

constexpr const char* kNodeDoc = R"(The buffer of queues between nodes.

    control_offset = bytes_per_token * recv_tokens * nodes * 2 * channels
    control_words  = (2 * local_world_size + 4) * nodes * 2 * channels

Args:
    bytes_per_token: of a record. recv_tokens: records that a queue holds.

Raises:
    ValueError: a number below its least, a result beyond 63 bits.)";

constexpr const char* kLocalDoc = R"(The buffer of queues inside a node.

    control_offset = bytes_per_token * recv_tokens * local_world_size * channels
    control_words  = local_world_size * (2 * nodes + 2) * channels

Args:
    bytes_per_token: of a record. recv_tokens: records that a queue holds.

Raises:
    ValueError: a number below its least, a result beyond 63 bits.)";

constexpr const char* kCleanDoc =
    R"(Where the control words of DeepEP V1's queue buffers are (8 ranks per node).

Args:
    route: "between_nodes" (node_buffer_layout) or "inside_node" (local_buffer_layout).

Returns:
    offset and count in words of 4 bytes.

Raises:
    ValueError: another route, a local_world_size other than 8, or as for the layouts.)";

}  // namespace

void bind_expert_parallel_sizes(nb::module_& m) {
  using namespace nb::literals;

  nb::class_<ep::BufferLayout>(m, "BufferLayout", "All records first, then the control words.")
      .def_ro("control_offset", &ep::BufferLayout::control_offset,
              "Bytes before the control words.")
      .def_ro("control_words", &ep::BufferLayout::control_words, "Of 4 bytes.")
      .def_ro("bytes", &ep::BufferLayout::bytes, "Of the whole buffer.");
  nb::class_<ep::CleanMeta>(
      m, "CleanMeta", "The control words that whoever transfers tokens sets to 0 before a call.")
      .def_ro("offset", &ep::CleanMeta::offset, "In words of 4 bytes.")
      .def_ro("count", &ep::CleanMeta::count, "In words of 4 bytes.");

  define<"def source_meta_bytes(local_world_size: int) -> int">(
      m, ep::source_meta_bytes,
      "Bytes of a source node and a mask of the ranks of a node: 8 with up to 32 ranks per "
      "node.\n\n"
      "Raises:\n    ValueError: local_world_size below 1, a result beyond 63 bits.");
  define<
      "def bytes_per_token(hidden_bytes: int, num_scales: int, num_topk_indices: int, "
      "num_topk_weights: int, local_world_size: int = 8) -> int">(m, ep::bytes_per_token,
                                                                  kRecordDoc);
  define<
      "def node_buffer_layout(*, bytes_per_token: int, recv_tokens: int, nodes: int = 1, "
      "local_world_size: int = 1, channels: int = 1) -> BufferLayout">(
      m, buffer_layout<ep::node_buffer_layout>, kNodeDoc);
  define<
      "def local_buffer_layout(*, bytes_per_token: int, recv_tokens: int, nodes: int = 1, "
      "local_world_size: int = 1, channels: int = 1) -> BufferLayout">(
      m, buffer_layout<ep::local_buffer_layout>, kLocalDoc);
  define<
      "def classic_clean_meta(route: str, *, bytes_per_token: int, recv_tokens: int, "
      "nodes: int = 1, local_world_size: int = 8, channels: int = 1) -> CleanMeta">(
      m, classic_clean_meta, kCleanDoc);
}

}  // namespace winnow::python
