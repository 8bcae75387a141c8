// Sizes of token records and queue buffers in the layout of DeepEP V1 (DeepSeek 2025), for engines
// that transfer tokens themselves.
#pragma once

#include <cstdint>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// All functions are pure. They throw Error (invalid_argument) if an argument is below its minimum,
// which the text names, or if the result exceeds 2^63 - 1; the text then gives all arguments.

// Bytes of a record's source metadata: the source node, and a mask with one bit per rank of the
// destination node in whole words of 4 bytes. 8 bytes for up to 32 ranks per node.
WINNOW_EXPORT std::int64_t source_meta_bytes(std::int64_t local_world_size);

// Bytes of one token's record between ranks:
//   payload | source metadata | scales f32 | expert indices i32 | weights f32, rounded up to 16.
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

// Between nodes each channel has a queue to send to and one to receive from each node. The control
// words of a queue are the begin and end of the tokens for each rank of the node and for the node
// as a whole, and one position of 64 bits:
//   control_offset = bytes_per_token * recv_tokens * nodes * 2 * channels
//   control_words  = (2 * local_world_size + 4) * nodes * 2 * channels
WINNOW_EXPORT BufferLayout node_buffer_layout(const QueueShape& shape);

// Inside a node each channel has a queue to receive from each rank. The control words of a queue
// are the begin and end of each source node's tokens, and two positions of 32 bits:
//   control_offset = bytes_per_token * recv_tokens * local_world_size * channels
//   control_words  = local_world_size * (2 * nodes + 2) * channels
WINNOW_EXPORT BufferLayout local_buffer_layout(const QueueShape& shape);

// The control words that an engine with DeepEP V1's buffers must set to 0 before each call.
struct CleanMeta {
  std::int64_t offset = 0;  // in words of 4 bytes
  std::int64_t count = 0;   // in words of 4 bytes
};
enum class QueueRoute { between_nodes, inside_node };

// The control words of node_buffer_layout() or local_buffer_layout(); the offset is rounded down.
// Throws Error (invalid_argument) also if local_world_size is not 8.
WINNOW_EXPORT CleanMeta classic_clean_meta(QueueRoute route, const QueueShape& shape);

}  // namespace winnow::expert_parallel
