// The base of in_process and shared_memory: every rank's memory can be accessed by pointer, so puts
// are copies, and the ranks of a world meet in control words that all of them see. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/transport.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

// By what the others find the memory that rank 0 created. Who opens it looks at what it finds.
struct MemoryHandle {
  std::uint64_t value = 0;
};
inline void check_bounds(const MemoryHandle&, const Sender&) {}

// The words of one rank for the others; only that rank writes them.
struct alignas(64) RankControl {
  std::uint64_t joined;            // 1: the transport of the rank is there
  std::uint64_t closed;            // 1: it is gone
  std::uint64_t arrived;           // number of the last allocation to which the rank has come,
  std::uint64_t created;           // for which it has made the memory (rank 0),
  std::uint64_t mapped;            // whose memory it can reach
  Untrusted<std::uint64_t> bytes;  // of the allocation `arrived`
  Untrusted<MemoryHandle> handle;  // of what rank 0 created
  char what[136];
};
static_assert(sizeof(RankControl) == 192);

// Shared by the ranks of a world; zero-filled memory is a new one.
struct WorldControl {
  FaultSlot fault;
  RankControl* ranks() { return reinterpret_cast<RankControl*>(this + 1); }
  static std::size_t bytes(int world_size) {
    return sizeof(WorldControl) + static_cast<std::size_t>(world_size) * sizeof(RankControl);
  }
};

// Zero-filled pages, shared with every process that maps the file, or private if `file` is -1. They
// are unmapped when the last owner is gone. Throws Error (resource).
WINNOW_EXPORT std::shared_ptr<std::byte> map_pages(std::size_t bytes, int file);

class WINNOW_EXPORT MappedTransport : public Transport {
 public:
  ~MappedTransport() override;
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string world_id() const override { return world_id_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes, const Deadline& deadline,
                                            std::string_view what) override;
  void put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
           std::size_t bytes) override;
  void put_signal(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                  std::size_t bytes, std::size_t signal_offset, std::uint64_t value) override;
  bool peer_gone(int rank) const override;
  void check() const override { check_process(); }

 protected:
  // `control` (of WorldControl) is kept as long as the transport.
  MappedTransport(std::string world_id, int rank, int world_size,
                  std::shared_ptr<std::byte> control);

  // Waits until every rank has its transport. What `look`, called now and then, throws ends it.
  void meet(const Deadline& deadline, const std::function<void()>& look);

  // Rank 0 makes the memory of all ranks and a handle, the others map it by the handle; afterwards
  // rank 0 gives up what only the opening needed.
  virtual std::shared_ptr<std::byte> create(std::size_t bytes, MemoryHandle& handle) = 0;
  virtual std::shared_ptr<std::byte> open(std::size_t bytes, MemoryHandle handle) = 0;
  virtual void opened_by_all() noexcept = 0;

  // The rank is there no more; what a class beneath destroys may come after it.
  void close();

  // Throws in a child of fork().
  void check_process() const;
  void check_rank(int rank) const;
  RankControl& control_of(int rank) const { return world().ranks()[rank]; }

  // How an allocation begins: all ranks have come and ask for the same. Its number.
  std::uint64_t agree_on(std::size_t bytes, const Deadline& deadline, std::string_view what);
  // Until this word of all ranks, and now of this one, has reached `number`.
  void reach(std::uint64_t RankControl::* word, std::uint64_t number, const Deadline& deadline);
  // Records the fault, which all ranks throw.
  [[noreturn]] void fail(ErrorCode code, int peer, const std::string& text,
                         ErrorReason reason = ErrorReason::none);
  // Makes what this rank alone could not do fail on all ranks.
  [[noreturn]] void fail_alone(const Error& error);

 private:
  WorldControl& world() const { return *reinterpret_cast<WorldControl*>(control_.get()); }
  void check_range(SymmetricMemory& memory, int rank, std::size_t offset, std::size_t bytes) const;
  // Until this word of the ranks below `ranks` has reached `number`.
  void await(std::uint64_t RankControl::* word, std::uint64_t number, int ranks,
             const Deadline& deadline, const std::function<void()>& look = {});
  FaultRecord record(ErrorCode code, int peer, const std::string& text, ErrorReason reason);
  void set_request(std::size_t bytes, std::string_view what);
  void check_same_request();
  void fail_if_absent(std::uint64_t RankControl::* word, std::uint64_t number, int ranks,
                      const Deadline& deadline);

  std::string world_id_;
  int rank_;
  int world_size_;
  int fork_generation_;
  std::shared_ptr<std::byte> control_;
  std::uint64_t allocations_ = 0;
};

}  // namespace winnow::expert_parallel
