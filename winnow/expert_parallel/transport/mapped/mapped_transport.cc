#include "winnow/expert_parallel/transport/mapped/mapped_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/rendezvous/announcement.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/transport/backoff.h"

namespace winnow::expert_parallel {
namespace {

constexpr const char* kAllocate = "expert_parallel::allocate";
constexpr std::size_t kPage = 4096;
// A look at the peers' processes costs a few system calls.
constexpr std::chrono::milliseconds kLookAtPeers{20};

// The memories of all ranks lie one behind the other.
class MappedMemory : public SymmetricMemory {
 public:
  MappedMemory(std::shared_ptr<std::byte> base, std::size_t stride, std::size_t bytes, int rank)
      : SymmetricMemory(base.get() + static_cast<std::size_t>(rank) * stride, bytes),
        base_(std::move(base)),
        stride_(stride) {}
  std::byte* peer(int rank) override {
    return base_.get() + static_cast<std::size_t>(rank) * stride_;
  }

 private:
  std::shared_ptr<std::byte> base_;
  std::size_t stride_;
};

}  // namespace

std::shared_ptr<std::byte> map_pages(std::size_t bytes, int file) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorCode::resource, kAllocate,
                "no " + std::to_string(bytes) + " bytes of memory: " + std::strerror(errno));
  }
  return {static_cast<std::byte*>(address),
          [bytes](std::byte* pages) { munmap(static_cast<void*>(pages), bytes); }};
}

MappedTransport::MappedTransport(std::string world_id, int rank, int world_size,
                                 std::shared_ptr<std::byte> control)
    : world_id_(std::move(world_id)),
      rank_(rank),
      world_size_(world_size),
      fork_generation_(fork_generation()),
      control_(std::move(control)) {
  store_release(&control_of(rank_).joined, 1);
}

MappedTransport::~MappedTransport() { close(); }

void MappedTransport::close() {
  // A child of fork() has the same control words before it, but is not the rank.
  if (fork_generation_ == fork_generation()) store_release(&control_of(rank_).closed, 1);
}

void MappedTransport::check_process() const {
  if (fork_generation_ == fork_generation()) return;
  throw Error(ErrorCode::invalid_argument, "expert_parallel::Transport",
              "used after fork() in the child: rank " + std::to_string(rank_) +
                  " is the parent; make a new world in the child");
}

void MappedTransport::check_rank(int rank) const {
  if (rank >= 0 && rank < world_size_) return;
  throw Error(ErrorCode::invalid_argument, "expert_parallel::Transport", "rank",
              "in [0, " + std::to_string(world_size_) + ")", std::to_string(rank));
}

void MappedTransport::check_range(SymmetricMemory& memory, int rank, std::size_t offset,
                                  std::size_t bytes) const {
  check_process();
  check_rank(rank);
  if (offset <= memory.bytes() && bytes <= memory.bytes() - offset) return;
  throw Error(ErrorCode::invalid_argument, "expert_parallel::put", "offset",
              "a range inside the " + std::to_string(memory.bytes()) + " bytes of memory",
              std::to_string(bytes) + " bytes at " + std::to_string(offset));
}

void MappedTransport::put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                          std::size_t bytes) {
  check_range(memory, rank, offset, bytes);
  if (bytes > 0) std::memcpy(memory.peer(rank) + offset, source, bytes);
}

void MappedTransport::put_signal(SymmetricMemory& memory, int rank, std::size_t offset,
                                 const void* source, std::size_t bytes, std::size_t signal_offset,
                                 std::uint64_t value) {
  put(memory, rank, offset, source, bytes);
  check_range(memory, rank, signal_offset, sizeof(value));
  if (signal_offset % sizeof(value) != 0) {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::put_signal", "signal_offset",
                "a multiple of 8", std::to_string(signal_offset));
  }
  store_release(reinterpret_cast<std::uint64_t*>(memory.peer(rank) + signal_offset), value);
}

bool MappedTransport::peer_gone(int rank) const {
  check_rank(rank);
  return load_acquire(&control_of(rank).closed) != 0;
}

std::uint64_t MappedTransport::agree_on(std::size_t bytes, const Deadline& deadline,
                                        std::string_view what) {
  check_process();
  if (const auto fault = read_fault(world().fault)) throw_fault(*fault, rank_);
  set_request(bytes, what);
  const std::uint64_t number = ++allocations_;
  reach(&RankControl::arrived, number, deadline);
  try {
    check_same_request();
  } catch (const Error& error) {  // where only this rank reads something else
    fail_alone(error);
  }
  return number;
}

void MappedTransport::reach(std::uint64_t RankControl::* word, std::uint64_t number,
                            const Deadline& deadline) {
  store_release(&(control_of(rank_).*word), number);
  await(word, number, world_size_, deadline);
}

void MappedTransport::fail_alone(const Error& error) {
  if (const auto fault = read_fault(world().fault)) throw_fault(*fault, rank_);
  fail(error.code(), rank_, "rank " + std::to_string(rank_) + ": " + error.what());
}

std::shared_ptr<SymmetricMemory> MappedTransport::allocate(std::size_t bytes,
                                                           const Deadline& deadline,
                                                           std::string_view what) {
  const std::uint64_t number = agree_on(bytes, deadline, what);
  RankControl& mine = control_of(rank_);
  const std::size_t stride = (bytes + kPage - 1) / kPage * kPage;
  const std::size_t total = stride * static_cast<std::size_t>(world_size_);
  std::shared_ptr<std::byte> base;
  try {
    if (rank_ == 0) {
      MemoryHandle handle;
      base = create(total, handle);
      mine.handle.write(handle);
      store_release(&mine.created, number);
    } else {
      await(&RankControl::created, number, 1, deadline);
      base = open(total, control_of(0).handle.read({kAllocate, what, 0}));
    }
  } catch (const Error& error) {
    fail_alone(error);
  }
  auto memory = std::make_shared<MappedMemory>(std::move(base), stride, bytes, rank_);
  reach(&RankControl::mapped, number, deadline);
  if (rank_ == 0) opened_by_all();
  return memory;
}

void MappedTransport::meet(const Deadline& deadline, const std::function<void()>& look) {
  set_request(WorldControl::bytes(world_size_), "the control memory of the world");
  await(&RankControl::joined, 1, world_size_, deadline, look);
}

constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

void MappedTransport::set_request(std::size_t bytes, std::string_view what) {
  RankControl& mine = control_of(rank_);
  mine.bytes.write(std::min<std::uint64_t>(bytes, kMostBytes));  // which is refused, too
  const std::size_t length = std::min(what.size(), sizeof(mine.what) - 1);
  std::memcpy(mine.what, what.data(), length);
  mine.what[length] = '\0';
}

// All ranks ask for the same: from here on each of them finds the same answer.
void MappedTransport::check_same_request() {
  const auto request_of = [&](int rank) {
    const RankControl& message = control_of(rank);
    const Sender by{kAllocate, "the request", rank};
    return std::pair(message.bytes.read(by, "bytes", 0, kMostBytes), untrusted_text(message.what));
  };
  const auto [bytes, what] = request_of(0);
  if (bytes == 0 || bytes > kMostBytes / static_cast<std::uint64_t>(world_size_) - kPage) {
    fail(ErrorCode::invalid_argument, -1,
         what + ": want at least 1 byte and what a machine can have, got " + std::to_string(bytes));
  }
  for (int rank = 1; rank < world_size_; ++rank) {
    const auto [other_bytes, other_what] = request_of(rank);
    if (other_bytes == bytes && other_what == what) continue;
    fail(ErrorCode::invalid_argument, rank,
         "the ranks differ: rank 0 allocates " + std::to_string(bytes) + " bytes for " + what +
             ", rank " + std::to_string(rank) + " " + std::to_string(other_bytes) + " bytes for " +
             other_what,
         ErrorReason::arguments_differ);
  }
}

void MappedTransport::await(std::uint64_t RankControl::* word, std::uint64_t number, int ranks,
                            const Deadline& deadline, const std::function<void()>& look) {
  Backoff backoff;
  Interrupts interrupts;
  auto next_look = Deadline::Clock::now() + kLookAtPeers;
  int reached = 0;  // ranks below have come
  for (;;) {
    if (const auto fault = read_fault(world().fault)) throw_fault(*fault, rank_);
    while (reached < ranks && load_acquire(&(control_of(reached).*word)) >= number) ++reached;
    if (reached == ranks) return;
    try {
      interrupts.look();
    } catch (...) {
      record(ErrorCode::timeout, rank_, "rank " + std::to_string(rank_) + " was interrupted",
             ErrorReason::interrupted);
      throw;
    }
    const auto now = Deadline::Clock::now();
    if (now >= deadline.end()) fail_if_absent(word, number, ranks, deadline);
    if (now >= next_look) {
      next_look = now + kLookAtPeers;
      if (look) look();
      for (int rank = reached; rank < ranks; ++rank) {
        // In this order: what a rank wrote before it ended counts.
        if (peer_gone(rank) && load_acquire(&(control_of(rank).*word)) < number) {
          fail_if_absent(word, number, ranks, deadline);
        }
      }
    }
    backoff.pause();
  }
}

void MappedTransport::fail(ErrorCode code, int peer, const std::string& text, ErrorReason reason) {
  const FaultRecord mine = record(code, peer, text, reason);
  throw_fault(read_fault(world().fault).value_or(mine), rank_);
}

FaultRecord MappedTransport::record(ErrorCode code, int peer, const std::string& text,
                                    ErrorReason reason) {
  FaultRecord record;
  record.code = code;
  record.reason = reason;
  record.operation = kAllocate;
  record.phase = untrusted_text(control_of(rank_).what);
  record.rank = rank_;
  record.peer = peer;
  record.waited_for = allocations_;
  record.text = text;
  record_first(world().fault, record);
  return record;
}

void MappedTransport::fail_if_absent(std::uint64_t RankControl::* word, std::uint64_t number,
                                     int ranks, const Deadline& deadline) {
  std::vector<int> absent;
  for (int rank = 0; rank < ranks; ++rank) {
    if (load_acquire(&(control_of(rank).*word)) < number) absent.push_back(rank);
  }
  if (absent.empty()) return;  // they came at the last moment
  std::string states = describe_peer(absent[0]);
  if (absent.size() > 1) {
    states.clear();
    for (const int rank : absent) {
      if (!states.empty()) states += "; ";
      states += "rank " + std::to_string(rank) + ": " + describe_peer(rank);
    }
  }
  fail(ErrorCode::timeout, absent[0],
       "rank " + std::to_string(rank_) + " waited " + to_seconds(deadline.elapsed()) + " for " +
           list_of_ranks(absent) + " at the allocation of " +
           untrusted_text(control_of(rank_).what) + ": " + states,
       peer_gone(absent[0]) ? ErrorReason::peer_gone : ErrorReason::absent);
}

}  // namespace winnow::expert_parallel
