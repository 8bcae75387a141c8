// Sizes of the records and queue buffers of engines that transfer tokens themselves.
#pragma once

#include <cstdint>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// All functions are pure and count in 64 bits. Errors: Error (invalid_argument) for a number below
// its least value, and for a result beyond 63 bits, naming function and arguments.

// Bytes of the source meta of a record: the source node and a mask with one bit per rank of the
// destination node, in whole words of 4 bytes. 8 up to 32 ranks per node.
WINNOW_EXPORT std::int64_t source_meta_bytes(std::int64_t local_world_size);

// Bytes of one token's record between ranks:
//   payload | source meta | scales f32 | expert indices i32 | weights f32, rounded up to 16.
WINNOW_EXPORT std::int64_t bytes_per_token(std::int64_t hidden_bytes, std::int64_t num_scales,
                                           std::int64_t num_topk_indices,
                                           std::int64_t num_topk_weights,
                                           std::int64_t local_world_size = 8);

// The queues of one rank: for each channel one per peer, of `recv_tokens` records.
struct QueueShape {
  std::int64_t bytes_per_token = 0;  // at least 1
  std::int64_t recv_tokens = 0;      // records that a queue holds, at least 0
  std::int64_t nodes = 1, local_world_size = 1, channels = 1;  // at least 1
};

// A buffer of queues: all records first, then the control words of all queues.
struct BufferLayout {
  std::int64_t control_offset = 0;  // bytes before the control words
  std::int64_t control_words = 0;   // of 4 bytes
  std::int64_t bytes = 0;           // of the whole buffer
};

// Between nodes: a queue to send and one to receive for each node, with the bounds of the tokens
// for each rank there and for the node, and one position of 64 bits:
//   control_offset = bytes_per_token * recv_tokens * nodes * 2 * channels
//   control_words  = (2 * local_world_size + 4) * nodes * 2 * channels
WINNOW_EXPORT BufferLayout node_buffer_layout(const QueueShape& shape);

// Inside a node: a queue to receive for each rank, with the bounds of each source node's tokens and
// two positions of 32 bits:
//   control_offset = bytes_per_token * recv_tokens * local_world_size * channels
//   control_words  = local_world_size * (2 * nodes + 2) * channels
WINNOW_EXPORT BufferLayout local_buffer_layout(const QueueShape& shape);

// The range that an engine with the classic queue buffers (8 ranks per node) must clear before it
// counts.
struct CleanMeta {
  std::int64_t offset = 0;  // in words of 4 bytes
  std::int64_t count = 0;   // the same
};
enum class QueueRoute { between_nodes, inside_node };

// The control words of node_buffer_layout() or local_buffer_layout() in words, offsets rounded
// down. Errors: also a local_world_size other than 8. Layout of the buffers: DeepEP V1 (DeepSeek
// 2025).
WINNOW_EXPORT CleanMeta classic_clean_meta(QueueRoute route, const QueueShape& shape);

}  // namespace winnow::expert_parallel
