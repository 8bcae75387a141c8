#include "winnow/expert_parallel/transport/call_order.h"

#include <cstdio>
#include <utility>

#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {
namespace {

// Slot::word, from its lowest bit: 24 bits of digest, 24 of calls, 16 of layers.
constexpr int kCallsShift = 24, kLayersShift = 48;
constexpr std::uint32_t kLowBits = (1u << kCallsShift) - 1;

std::uint32_t add(std::uint32_t digest, std::uint32_t value) {
  return (digest ^ value) * 16777619u;  // as FNV-1a adds a byte
}

}  // namespace

CallOrder::CallOrder(std::shared_ptr<SymmetricMemory> memory, std::size_t offset, int rank)
    : memory_(std::move(memory)), offset_(offset), rank_(rank) {}

CallOrder::Slot& CallOrder::slot(int rank) const {
  std::byte* const memory = rank == rank_ ? memory_->local() : memory_->peer(rank);
  return *reinterpret_cast<Slot*>(memory + offset_);
}

int CallOrder::begin_layer(Communicator* layer) {
  forget();
  calls_ = 0;
  known_ = true;
  const std::lock_guard lock(mutex_);
  layers_.push_back(layer);
  return ++made_;
}

void CallOrder::end_layer(Communicator* layer) {
  const std::lock_guard lock(mutex_);
  std::erase(layers_, layer);
}

void CallOrder::begin_call(int layer, std::string_view operation) {
  if (!known_) return;
  // The digest is of this call alone: if an earlier one differed, every rank has had its error.
  std::uint32_t digest = add(0, static_cast<std::uint32_t>(layer));
  for (const char letter : operation) digest = add(digest, static_cast<unsigned char>(letter));
  Slot& own = slot(rank_);
  store_release(&own.word, 0);
  // This allocates nothing: the other ranks would wait for one that has run out of memory here.
  std::snprintf(own.text, Slot::kTextBytes, "%.*s of layer %d", static_cast<int>(operation.size()),
                operation.data(), layer);
  // The count goes from 1 to 65535 and begins again at 1, so that the word is never 0.
  const std::uint64_t layers = (static_cast<std::uint64_t>(made_) - 1) % 0xffff + 1;
  store_release(&own.word, layers << kLayersShift |
                               std::uint64_t{++calls_ & kLowBits} << kCallsShift |
                               (digest & kLowBits));
}

void CallOrder::forget() {
  known_ = false;
  store_release(&slot(rank_).word, 0);
}

std::string CallOrder::other_call(int rank) const {
  if (rank == rank_ || memory_->peer(rank) == nullptr) return {};
  const Slot& other = slot(rank);
  const std::uint64_t own = slot(rank_).word, word = load_acquire(&other.word);
  // Only calls of the same number can be compared: a rank may be ahead of this one, or behind it.
  if (own == 0 || word == 0 || word == own || (word ^ own) >> kCallsShift != 0) return {};
  std::string text = untrusted_text(other.text);
  std::atomic_thread_fence(std::memory_order_acquire);
  return load_acquire(&other.word) == word ? text : std::string();
}

}  // namespace winnow::expert_parallel
