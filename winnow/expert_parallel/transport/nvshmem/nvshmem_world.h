// The NVSHMEM world of this process. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// There is one in a process, from its first transport to its end. NVSHMEM's collective calls wait
// for all ranks without end, so each runs on a thread of its own, which is left alone when it does
// not return in time; the world is broken then. Thread-safe; collective calls come in the same
// order on every rank.
class WINNOW_EXPORT NvshmemWorld {
 public:
  static NvshmemWorld& instance();  // never destroyed

  // Who belongs to it; `id` is empty before it is started.
  struct Group {
    std::string id;
    int rank = -1;
    Device device;
    std::vector<ProcessIdentity> processes;
  };
  Group group() const;

  // Throws Error (unsupported) where no collective call can end any more.
  void check(const std::string& operation) const;

  // Collective. Errors: timeout, internal.
  void start(const NvshmemLibrary& library, const Group& group, const std::string& unique_id,
             const Deadline& deadline);

  // Collective. The number is the same on every rank; the memory is null where there was none.
  struct Memory {
    std::uint64_t number = 0;
    std::byte* data = nullptr;
  };
  Memory allocate(std::size_t bytes, const Deadline& deadline);
  // Memories that this rank uses no more. When all ranks have let go of one, all may free it.
  void let_go(std::uint64_t number) noexcept;
  std::set<std::uint64_t> let_go() const;
  void free(std::uint64_t number, const Deadline& deadline);  // collective

  std::byte* pointer(std::byte* memory, int rank) const;
  const FabricKernels* fabric() const { return library_->fabric; }

 private:
  NvshmemWorld() = default;
  // What is to be said of a process that is gone; empty while all live.
  std::string ended_rank() const;
  // Throws where the call has not returned at the deadline, or soon after the end of a rank.
  void run(const char* what, const Deadline& deadline, std::function<void()> call);

  mutable std::mutex mutex_;
  Group group_;
  const NvshmemLibrary* library_ = nullptr;
  std::string broken_;  // why; empty: it is not
  std::uint64_t allocations_ = 0;
  std::map<std::uint64_t, std::byte*> memories_;
  std::set<std::uint64_t> let_go_;
};

// create_nvshmem() with a library that is given; null where `obstacle` says why this rank cannot
// take part, which every rank then throws.
WINNOW_EXPORT std::shared_ptr<Transport> join_nvshmem(
    const NvshmemLibrary* library, std::string obstacle, std::shared_ptr<Store> store, int rank,
    int world_size, Device device, const Deadline& deadline, const std::string& prefix);

}  // namespace winnow::expert_parallel
