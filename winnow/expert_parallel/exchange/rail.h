// Moves rows between nodes on the CPU. A rank sends the rows of its tokens to its rail peers in
// chunks, each with a signal of its own. Internal.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {

// Signals carry the epoch and are never cleared. The buffers serve one call at a time: a peer
// writes in epoch e + 1 only after it has received that this rank has finished epoch e.
class Rail {
 public:
  // Collective. For max_tokens tokens with rows and scales of up to row_bytes and scale_bytes.
  Rail(Communicator& communicator, std::int64_t max_tokens, std::int64_t row_bytes,
       std::int64_t scale_bytes, std::chrono::nanoseconds timeout);

  // Begins a call. Waits until the next begin() belong to it.
  void begin(std::uint64_t epoch, std::string_view operation);

  // Writes rows of `count` consecutive tokens, which are contiguous, into the buffer of this rank's
  // rail peer on `node`, at the index of the token. Scales have a buffer of their own.
  void put_rows(int node, std::int64_t token, const void* rows, std::int64_t count,
                std::int64_t row_bytes);
  void put_scales(int node, std::int64_t token, const void* scales, std::int64_t count,
                  std::int64_t scale_bytes);
  // Signals to the peer that the rows and scales of the chunk are written.
  void send_chunk(int node, std::int64_t chunk);
  // Waits until the rail peer on `node` has sent the chunk.
  void wait_chunk(int node, std::int64_t chunk, std::string_view phase);
  // The row and the scales of a token that the rail peer on `node` has written.
  const std::byte* row(int node, std::int64_t token, std::int64_t row_bytes) const;
  const std::byte* scale(int node, std::int64_t token, std::int64_t scale_bytes) const;

  // A barrier of this node's ranks, after which none uses another's memory.
  void finish(std::string_view phase);

 private:
  std::size_t done_offset(int local) const;
  std::size_t chunk_offset(int node, std::int64_t chunk) const;
  std::size_t row_offset(int node, std::int64_t token, std::int64_t row_bytes) const;
  std::size_t scale_offset(int node, std::int64_t token, std::int64_t scale_bytes) const;
  void wait(std::size_t offset, std::string_view phase, int peer);

  Communicator& communicator_;
  std::int64_t max_tokens_, chunks_, row_bytes_, scale_bytes_;
  std::chrono::nanoseconds timeout_;
  std::uint64_t epoch_ = 0;
  std::string_view operation_;
  std::size_t rows_begin_ = 0, scales_begin_ = 0;
  std::shared_ptr<SymmetricMemory> memory_;
};

}  // namespace winnow::expert_parallel
