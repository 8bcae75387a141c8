// How rows move once all ranks know their places: along the rail in chunks, each with a signal of
// its own, and by pointer inside a node, whose ranks tell each other when they are done. Internal.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {

// Signals carry the epoch, so that none is ever cleared. The rail's buffers serve one call at a
// time: a peer writes in epoch e + 1 only when it has received that this rank is through with e.
class Rail {
 public:
  // Collective. Rows of at most `row_bytes`, scales of at most `scale_bytes`, of max_tokens tokens.
  Rail(Communicator& communicator, std::int64_t max_tokens, std::int64_t row_bytes,
       std::int64_t scale_bytes, std::chrono::nanoseconds timeout);

  // Every wait until the next begin() belongs to this call.
  void begin(std::uint64_t epoch, std::string_view operation);

  // Writes rows of consecutive tokens, back to back, to this rank's rail peer on `node`, at the
  // token's own place. Scales stand in a table of their own.
  void put_rows(int node, std::int64_t token, const void* rows, std::int64_t count,
                std::int64_t row_bytes);
  void put_scales(int node, std::int64_t token, const void* scales, std::int64_t count,
                  std::int64_t scale_bytes);
  // The rows and scales of the chunk are written.
  void send_chunk(int node, std::int64_t chunk);
  // Waits until the rail peer on `node` has sent the chunk.
  void wait_chunk(int node, std::int64_t chunk, std::string_view phase);
  // What the rail peer on `node` wrote.
  const std::byte* row(int node, std::int64_t token, std::int64_t row_bytes) const;
  const std::byte* scale(int node, std::int64_t token, std::int64_t scale_bytes) const;

  // Tells the ranks of this node that this one is done with their memory, and waits for them.
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
