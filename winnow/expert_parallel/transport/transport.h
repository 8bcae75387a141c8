// The interface of a transport: identifies the ranks, allocates symmetric memory and performs puts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

class CallOrder;
struct FabricKernels;

// Memory with the same number of bytes on every rank, zero-filled and aligned to 4096. It lives as
// long as any rank holds it, also after the transport and the other ranks are gone. GPU memory can
// be accessed only by work on that GPU; put() does not support it.
class WINNOW_EXPORT SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  std::byte* local() { return local_; }
  std::size_t bytes() const { return bytes_; }
  // That rank's memory in this process; null if only puts reach it.
  virtual std::byte* peer(int rank) = 0;
  // For memory of a GPU whose transport puts by copying through pointers: a table on that GPU with
  // the pointers of all ranks. Null otherwise.
  virtual std::byte* const* peers() { return nullptr; }

 protected:
  SymmetricMemory(std::byte* local, std::size_t bytes) : local_(local), bytes_(bytes) {}

 private:
  std::byte* local_;
  std::size_t bytes_;
};

// One rank of a world. A rank is one thread at a time; only describe_peer() and peer_gone() may be
// called from any thread. In a child of fork() every call is an Error: see transport.md.
class WINNOW_EXPORT Transport {
 public:
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;  // "in_process", "shared_memory", "nvshmem"
  // The same on every rank and no other world's: the prefix of this world's keys in a store.
  virtual std::string world_id() const = 0;

  // Collective: every rank calls it in the same order with the same `bytes` and `what` (the name
  // that errors give this memory). Errors (winnow::Error): timeout, naming the ranks that did not
  // come; invalid_argument where the ranks differ; resource. Every rank gets the same error, even
  // one that comes late. The world can allocate nothing after it: create a new one.
  virtual std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes, const Deadline& deadline,
                                                    std::string_view what) = 0;

  // As allocate(), on GPUs: every rank passes its own GPU, the same one in every call. Further
  // error: unsupported, if the transport or the machine cannot do it.
  virtual std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                         const Deadline& deadline,
                                                         std::string_view what);
  // The kernels that put across nodes; null where allocate_cuda() is unsupported. Internal.
  virtual const FabricKernels* fabric() { return nullptr; }
  // The number of ranks on this rank's GPU, including itself. Known after an allocate_cuda().
  virtual int ranks_on_gpu() const { return 1; }

  // Copies into that rank's memory. `source` may be reused when the call returns.
  virtual void put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                   std::size_t bytes) = 0;
  // Copies the data and then sets the 64-bit word at `signal_offset` (a multiple of 8) to `value`.
  // A reader that loads the word with acquire sees the data and every earlier put of this rank
  // there.
  virtual void put_signal(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                          std::size_t bytes, std::size_t signal_offset, std::uint64_t value) = 0;

  // Throws Error (unsupported) if the world can create nothing new because a rank is gone.
  virtual void check() const {}
  // For error texts: "process 4711, stopped", "process 4711, gone", "thread, running".
  virtual std::string describe_peer(int rank) const = 0;
  // Whether the rank certainly will not write again; a wait for it then ends early.
  virtual bool peer_gone(int rank) const = 0;

  // For waits on a GPU, where peer_gone() cannot be called. Calls `gone(rank)` from any thread,
  // once for each other rank of this host that will not write again, neither itself nor by work
  // that it has queued on a GPU. Releasing the returned handle ends the calls. Returns null if the
  // transport does not watch its peers.
  virtual std::shared_ptr<void> watch_peers(std::function<void(int rank)> gone);
  // While it is held, this rank is not gone for watch_peers(): its work is still under way.
  virtual std::shared_ptr<void> presence() { return nullptr; }

  // 0, 1, 2, ...: numbers the collective agreements over this transport (agreement.h).
  std::uint64_t next_agreement() { return agreements_++; }
  std::uint64_t agreements() const { return agreements_; }  // that were begun
  // Of the calls on the CPU; null before the first Communicator, which makes it.
  std::shared_ptr<CallOrder>& call_order() { return call_order_; }

 protected:
  Transport() = default;

 private:
  std::uint64_t agreements_ = 0;
  std::shared_ptr<CallOrder> call_order_;
};

// All access to the words through which ranks signal each other uses these two functions.
inline std::uint64_t load_acquire(const std::uint64_t* word) {
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(word))
      .load(std::memory_order_acquire);
}
inline void store_release(std::uint64_t* word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}

}  // namespace winnow::expert_parallel
