// Memory for GPU layers that is had and given back without waiting for anything that runs there:
// other ranks' kernels may be waiting for this very thread. In builds without CUDA what would need
// it throws Error (unsupported). Internal.
#pragma once

#include <cstddef>
#include <memory>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"
#include "winnow/expert_parallel/transport/transport.h"

struct CUevent_st;
struct CUstream_st;

namespace winnow::expert_parallel {

// Zero-filled, aligned to 4096, reachable by every GPU of the process that can reach `device`. It
// goes back when the last owner lets go and what free_after() was told has happened. Errors
// (winnow::Error): resource; unsupported, where the GPU cannot be used.
WINNOW_EXPORT std::shared_ptr<std::byte> allocate_cuda_memory(Device device, std::size_t bytes);
// Memory of any GPU that is given back from now on goes when the event has come to pass: kernels of
// one GPU write to the memory of others.
WINNOW_EXPORT void free_after(CUevent_st* event);
// Lets go of what `kept` owns when memory that `device` gives back now would go. On a thread of
// CUDA's, which may not call CUDA.
WINNOW_EXPORT void keep_until_freed(Device device, std::shared_ptr<void> kept);

// Whether kernels of `device` can use what was allocated on `other`.
WINNOW_EXPORT bool reaches(Device device, Device other);

// Copies from the host and returns when it is done.
WINNOW_EXPORT void write_cuda_memory(Device device, void* to, const void* from, std::size_t bytes);

// The memory of one rank alone as a symmetric one, so that an Arena can deal it out.
WINNOW_EXPORT std::shared_ptr<SymmetricMemory> own_memory(Device device, std::size_t bytes);

// A queue of a GPU that waits for no other. Errors (winnow::Error): resource, unsupported.
class WINNOW_EXPORT CudaStream {
 public:
  explicit CudaStream(Device device);
  // A stream of the caller's, null: the default one, for the same operations.
  CudaStream(Device device, Stream stream);
  Stream stream() const { return {stream_.get()}; }
  // In stream order, between any two places. Host memory must stay until wait(). Whatever their
  // number, rows are one operation: a queue holds about a thousand, and who fills it waits inside
  // CUDA, where other threads wait for him.
  void copy(void* to, const void* from, std::size_t bytes) {
    copy_rows(to, bytes, from, bytes, bytes, 1);
  }
  void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                 std::size_t bytes, std::size_t rows);
  void fill_rows(void* to, std::size_t pitch, int byte, std::size_t bytes, std::size_t rows);
  void wait();

 private:
  Device device_;
  std::shared_ptr<CUstream_st> stream_;
};

// Work that `then` is given from now on begins when `first` has come to where it is now.
WINNOW_EXPORT void order(Device of_first, Stream first, Device of_then, Stream then);

// Pinned host memory that kernels write, zero-filled. Pages are used again, by later layers, once
// the event given to retire() has come to pass; the process keeps them.
class WINNOW_EXPORT PinnedPage {
 public:
  PinnedPage() = default;
  explicit PinnedPage(std::size_t bytes);
  PinnedPage& operator=(PinnedPage&& other) noexcept;  // swaps
  ~PinnedPage();                                       // retired without an event: never used again

  std::byte* host() const { return host_; }
  std::byte* device() const { return device_; }
  void retire(CUevent_st* event) noexcept;  // owns the event then

 private:
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace winnow::expert_parallel
