#include "winnow/expert_parallel/exchange/rail.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::int64_t kWord = sizeof(std::uint64_t);
constexpr std::int64_t kPage = 4096;

std::int64_t round_up(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Rail::Rail(Communicator& communicator, std::int64_t max_tokens, std::int64_t row_bytes,
           std::int64_t scale_bytes, std::chrono::nanoseconds timeout)
    : communicator_(communicator),
      max_tokens_(max_tokens),
      chunks_((max_tokens + kChunkTokens - 1) / kChunkTokens),
      row_bytes_(row_bytes),
      scale_bytes_(scale_bytes),
      timeout_(timeout) {
  const Topology& topology = communicator.topology();
  const std::int64_t nodes = topology.nodes() > 1 ? topology.nodes() : 0;  // else there is no rail
  rows_begin_ =
      static_cast<std::size_t>(round_up((topology.local_world_size + nodes * chunks_) * kWord));
  scales_begin_ = rows_begin_ + static_cast<std::size_t>(round_up(nodes * max_tokens * row_bytes));
  const std::size_t bytes =
      scales_begin_ + static_cast<std::size_t>(round_up(nodes * max_tokens * scale_bytes));
  memory_ = communicator.allocate(bytes, Deadline(timeout), "the rail buffers");
}

void Rail::begin(std::uint64_t epoch, std::string_view operation) {
  epoch_ = epoch;
  operation_ = operation;
}

std::size_t Rail::done_offset(int local) const { return static_cast<std::size_t>(local * kWord); }
std::size_t Rail::chunk_offset(int node, std::int64_t chunk) const {
  const std::int64_t signal = communicator_.topology().local_world_size + node * chunks_ + chunk;
  return static_cast<std::size_t>(signal * kWord);
}
std::size_t Rail::row_offset(int node, std::int64_t token, std::int64_t row_bytes) const {
  return rows_begin_ +
         static_cast<std::size_t>(node * max_tokens_ * row_bytes_ + token * row_bytes);
}
std::size_t Rail::scale_offset(int node, std::int64_t token, std::int64_t scale_bytes) const {
  return scales_begin_ +
         static_cast<std::size_t>(node * max_tokens_ * scale_bytes_ + token * scale_bytes);
}

void Rail::put_rows(int node, std::int64_t token, const void* rows, std::int64_t count,
                    std::int64_t row_bytes) {
  communicator_.put(*memory_, node, communicator_.local(),
                    row_offset(communicator_.node(), token, row_bytes), rows,
                    static_cast<std::size_t>(count * row_bytes));
}

void Rail::put_scales(int node, std::int64_t token, const void* scales, std::int64_t count,
                      std::int64_t scale_bytes) {
  communicator_.put(*memory_, node, communicator_.local(),
                    scale_offset(communicator_.node(), token, scale_bytes), scales,
                    static_cast<std::size_t>(count * scale_bytes));
}

void Rail::send_chunk(int node, std::int64_t chunk) {
  communicator_.put_signal(*memory_, node, communicator_.local(), 0, nullptr, 0,
                           chunk_offset(communicator_.node(), chunk), epoch_);
}

void Rail::wait_chunk(int node, std::int64_t chunk, std::string_view phase) {
  wait(chunk_offset(node, chunk), phase,
       communicator_.topology().rank(node, communicator_.local()));
}

const std::byte* Rail::row(int node, std::int64_t token, std::int64_t row_bytes) const {
  return Communicator::local_memory(*memory_) + row_offset(node, token, row_bytes);
}

const std::byte* Rail::scale(int node, std::int64_t token, std::int64_t scale_bytes) const {
  return Communicator::local_memory(*memory_) + scale_offset(node, token, scale_bytes);
}

void Rail::finish(std::string_view phase) {
  const Topology& topology = communicator_.topology();
  const int node = communicator_.node(), local = communicator_.local();
  for (int to = 0; to < topology.local_world_size; ++to) {
    communicator_.put_signal(*memory_, node, to, 0, nullptr, 0, done_offset(local), epoch_);
  }
  for (int from = 0; from < topology.local_world_size; ++from) {
    wait(done_offset(from), phase, topology.rank(node, from));
  }
}

void Rail::wait(std::size_t offset, std::string_view phase, int peer) {
  const auto* word =
      reinterpret_cast<const std::uint64_t*>(Communicator::local_memory(*memory_) + offset);
  communicator_.wait_at_least(word, epoch_, Deadline(timeout_), WaitName{operation_, phase, peer});
}

}  // namespace winnow::expert_parallel
