// Memory for GPU layers, allocated and freed without waiting for work on the GPU: kernels of other
// ranks may be waiting for this very thread. In builds without CUDA, everything that needs a GPU
// throws Error (unsupported). Internal.
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

// Zero-filled memory, aligned to 4096, accessible to every GPU of the process that can access
// `device`. It is freed once its last owner has released it and the events of free_after() have
// occurred. Errors (winnow::Error): resource; unsupported, if the GPU cannot be used.
WINNOW_EXPORT std::shared_ptr<std::byte> allocate_cuda_memory(Device device, std::size_t bytes);
// Memory of any GPU that is released from now on is freed after the event: kernels of one GPU write
// to the memory of others.
WINNOW_EXPORT void free_after(CUevent_st* event);
// Releases `kept` when memory of `device` that is released now would be freed, on a thread of CUDA,
// which must not call CUDA.
WINNOW_EXPORT void keep_until_freed(Device device, std::shared_ptr<void> kept);

// Whether kernels of `device` can access memory of `other`.
WINNOW_EXPORT bool reaches(Device device, Device other);

// Copies from the host and returns when it is done.
WINNOW_EXPORT void write_cuda_memory(Device device, void* to, const void* from, std::size_t bytes);

// Memory of this rank alone as a SymmetricMemory, from which an Arena can allocate.
WINNOW_EXPORT std::shared_ptr<SymmetricMemory> own_memory(Device device, std::size_t bytes);

// A stream that does not wait for others. Errors (winnow::Error): resource, unsupported.
class WINNOW_EXPORT CudaStream {
 public:
  explicit CudaStream(Device device);
  // The same operations on a stream of the caller; null: the default stream.
  CudaStream(Device device, Stream stream);
  Stream stream() const { return {stream_.get()}; }
  // Copies in stream order, between any two places. Host memory must stay valid until wait(). A
  // copy of rows is one operation, whatever their number: a stream holds about a thousand, and a
  // thread that fills it waits inside CUDA, where it holds up other threads.
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

// Work that is queued on `then` from now on begins after the work that is queued on `first` now.
WINNOW_EXPORT void order(Device of_first, Stream first, Device of_then, Stream then);

// Pinned host memory that kernels write, zero-filled. The process keeps the pages, and later layers
// reuse a page once the event given to retire() has occurred.
class WINNOW_EXPORT PinnedPage {
 public:
  PinnedPage() = default;
  explicit PinnedPage(std::size_t bytes);
  PinnedPage& operator=(PinnedPage&& other) noexcept;  // swaps
  ~PinnedPage();                                       // without retire() the page is not reused

  std::byte* host() const { return host_; }
  std::byte* device() const { return device_; }
  void retire(CUevent_st* event) noexcept;  // takes the event over

 private:
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace winnow::expert_parallel
