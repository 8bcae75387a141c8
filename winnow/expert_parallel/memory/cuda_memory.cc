#include "winnow/expert_parallel/memory/cuda_memory.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

constexpr const char* kAllocate = "expert_parallel::allocate";
constexpr std::size_t kPage = 4096;

void check(cudaError_t error, const std::string& what, Device device) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it is told here, and nowhere else
  throw Error(ErrorCode::resource, kAllocate,
              what + " on " + to_string(device) + ": " + cudaGetErrorString(error));
}

// This thread may be recording a graph, which allocations are no part of.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A pool of one GPU, with a stream for what must be there at once and one for what goes when its
// time has come. Neither waits for other streams.
struct Heap {
  cudaMemPool_t pool = nullptr;
  cudaStream_t now = nullptr, later = nullptr;

  explicit Heap(Device device) {
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location = {cudaMemLocationTypeDevice, device.index};
    check(cudaMemPoolCreate(&pool, &props), "a memory pool", device);
    int no = 0;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no),
          "a memory pool", device);
    int count = 0;
    check(cudaGetDeviceCount(&count), "the count of GPUs", device);
    for (int other = 0; other < count; ++other) {
      int can = 0;
      if (other == device.index) continue;
      if (cudaDeviceCanAccessPeer(&can, other, device.index) != cudaSuccess || can == 0) continue;
      const cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, other},
                                        cudaMemAccessFlagsProtReadWrite};
      check(cudaMemPoolSetAccess(pool, &access, 1), "access for the other GPUs", device);
    }
    // Of another priority than most streams, so that they share no hardware queue with kernels that
    // wait for other ranks.
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "a stream", device);
    for (cudaStream_t* stream : {&now, &later}) {
      check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest), "a stream",
            device);
    }
  }
};

// One per GPU, kept by the process.
struct Heaps {
  std::mutex mutex;
  std::map<int, Heap> by_gpu;
};
Heaps& heaps() {
  static auto* all = new Heaps;
  return *all;
}
Heap& heap_of(Device device) {
  const std::lock_guard lock(heaps().mutex);
  return heaps().by_gpu.try_emplace(device.index, device).first->second;
}

class OwnMemory : public SymmetricMemory {
 public:
  OwnMemory(std::shared_ptr<std::byte> memory, std::size_t bytes)
      : SymmetricMemory(memory.get(), bytes), memory_(std::move(memory)) {}
  std::byte* peer(int) override { return nullptr; }

 private:
  std::shared_ptr<std::byte> memory_;
};

struct SparePage {
  std::byte* host;
  std::size_t bytes;
  cudaEvent_t free;  // from when on; null: now
};

struct SparePages {
  std::mutex mutex;
  std::vector<SparePage> pages;
};
SparePages& spare_pages() {
  static auto* pages = new SparePages;
  return *pages;
}

std::byte* find_spare_page(std::size_t bytes) {
  SparePages& spare = spare_pages();
  const std::lock_guard lock(spare.mutex);
  for (SparePage& page : spare.pages) {
    if (page.bytes != bytes) continue;
    if (page.free != nullptr && cudaEventQuery(page.free) != cudaSuccess) continue;
    if (page.free != nullptr) cudaEventDestroy(page.free);
    std::byte* host = page.host;
    page = spare.pages.back();
    spare.pages.pop_back();
    return host;
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<std::byte> allocate_cuda_memory(Device device, std::size_t bytes) {
  const DeviceGuard guard(device);
  const OutsideCapture outside;
  Heap& heap = heap_of(device);
  void* memory = nullptr;
  const std::string what = std::to_string(bytes) + " bytes";
  check(cudaMallocFromPoolAsync(&memory, bytes + kPage, heap.pool, heap.now), what, device);
  std::shared_ptr<void> owner(memory, [device](void* p) {
    cudaFreeAsync(p, heap_of(device).later);  // at exit the context may be gone already
  });
  check(cudaMemsetAsync(memory, 0, bytes + kPage, heap.now), what, device);
  check(cudaStreamSynchronize(heap.now), what, device);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return {std::move(owner), reinterpret_cast<std::byte*>((address + kPage - 1) / kPage * kPage)};
}

void free_after(cudaEvent_t event) {
  const std::lock_guard lock(heaps().mutex);
  for (const auto& [gpu, heap] : heaps().by_gpu) {
    const DeviceGuard guard({DeviceType::cuda, gpu});
    cudaStreamWaitEvent(heap.later, event);
  }
}

void keep_until_freed(Device device, std::shared_ptr<void> kept) {
  if (kept == nullptr) return;
  const DeviceGuard guard(device);
  const OutsideCapture outside;
  auto* owner = new std::shared_ptr<void>(std::move(kept));
  const auto let_go = [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); };
  if (cudaLaunchHostFunc(heap_of(device).later, let_go, owner) == cudaSuccess) return;
  cudaGetLastError();
  delete owner;
}

bool reaches(Device device, Device other) {
  int can = 0;
  return device == other ||
         (cudaDeviceCanAccessPeer(&can, device.index, other.index) == cudaSuccess && can != 0);
}

void write_cuda_memory(Device device, void* to, const void* from, std::size_t bytes) {
  const DeviceGuard guard(device);
  const OutsideCapture outside;
  Heap& heap = heap_of(device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, heap.now), "a copy", device);
  check(cudaStreamSynchronize(heap.now), "a copy", device);
}

std::shared_ptr<SymmetricMemory> own_memory(Device device, std::size_t bytes) {
  return std::make_shared<OwnMemory>(allocate_cuda_memory(device, bytes), bytes);
}

PinnedPage::PinnedPage(std::size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
  host_ = find_spare_page(bytes_);
  void* memory = host_;
  if (host_ == nullptr) {
    const OutsideCapture outside;
    const cudaError_t error =
        cudaHostAlloc(&memory, bytes_, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw Error(ErrorCode::resource, kAllocate,
                  std::to_string(bytes_) + " bytes of pinned memory: " + cudaGetErrorString(error));
    }
    host_ = static_cast<std::byte*>(memory);
  }
  std::memset(host_, 0, bytes_);
  if (cudaHostGetDevicePointer(&memory, host_, 0) != cudaSuccess) {
    throw Error(ErrorCode::resource, kAllocate, "pinned memory that the GPU does not reach");
  }
  device_ = static_cast<std::byte*>(memory);
}

PinnedPage& PinnedPage::operator=(PinnedPage&& other) noexcept {
  std::swap(host_, other.host_);
  std::swap(device_, other.device_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedPage::~PinnedPage() = default;

void PinnedPage::retire(cudaEvent_t event) noexcept {
  if (host_ == nullptr) return;
  SparePages& spare = spare_pages();
  const std::lock_guard lock(spare.mutex);
  try {
    spare.pages.push_back({std::exchange(host_, nullptr), bytes_, event});
  } catch (const std::bad_alloc&) {  // one page less
  }
}

// Streams are used again: CUDA gives new ones the hardware queues in turn, and two that are alive
// must not get the same one, or the kernels of one may wait behind those that wait for them.
CudaStream::CudaStream(Device device) : device_(device) {
  struct Idle {
    std::mutex mutex;
    std::map<int, std::vector<cudaStream_t>> streams;  // by GPU
  };
  static auto* idle = new Idle;
  const auto give_back = [index = device.index](cudaStream_t stream) {
    const std::lock_guard lock(idle->mutex);
    idle->streams[index].push_back(stream);
  };
  {
    const std::lock_guard lock(idle->mutex);
    std::vector<cudaStream_t>& streams = idle->streams[device.index];
    if (!streams.empty()) {
      stream_ = {streams.back(), give_back};
      streams.pop_back();
      return;
    }
  }
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream", device);
  stream_ = {stream, give_back};
}

CudaStream::CudaStream(Device device, Stream stream)
    : device_(device), stream_(static_cast<cudaStream_t>(stream.handle), [](cudaStream_t) {}) {}

// CUDA asks whether the current GPU may reach the memory, not whether the stream's GPU may; and the
// heap of NVSHMEM is open to its own GPU only.
void CudaStream::copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                           std::size_t bytes, std::size_t rows) {
  const DeviceGuard guard(device_);
  const bool dense = rows < 2 || (to_pitch == bytes && from_pitch == bytes);
  check(dense ? cudaMemcpyAsync(to, from, rows * bytes, cudaMemcpyDefault, stream_.get())
              : cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDefault,
                                  stream_.get()),
        "a copy", device_);
}

void CudaStream::fill_rows(void* to, std::size_t pitch, int byte, std::size_t bytes,
                           std::size_t rows) {
  const DeviceGuard guard(device_);
  check(rows < 2 || pitch == bytes ? cudaMemsetAsync(to, byte, rows * bytes, stream_.get())
                                   : cudaMemset2DAsync(to, pitch, byte, bytes, rows, stream_.get()),
        "a fill", device_);
}

void CudaStream::wait() { check(cudaStreamSynchronize(stream_.get()), "the stream", device_); }

void order(Device of_first, Stream first, Device of_then, Stream then) {
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaSuccess;
  {
    const DeviceGuard guard(of_first);
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event", of_first);
    error = cudaEventRecord(event, static_cast<cudaStream_t>(first.handle));
  }
  const DeviceGuard guard(of_then);
  if (error == cudaSuccess) {
    error = cudaStreamWaitEvent(static_cast<cudaStream_t>(then.handle), event);
  }
  cudaEventDestroy(event);  // when it has come to pass
  check(error, "the order of streams", of_then);
}

}  // namespace winnow::expert_parallel

#else

namespace winnow::expert_parallel {
namespace {

[[noreturn]] void no_cuda() {
  throw Error(ErrorCode::unsupported, "expert_parallel::allocate",
              "this build has no CUDA kernels");
}

}  // namespace

std::shared_ptr<std::byte> allocate_cuda_memory(Device, std::size_t) { no_cuda(); }
CudaStream::CudaStream(Device) { no_cuda(); }
CudaStream::CudaStream(Device, Stream) { no_cuda(); }
void CudaStream::copy_rows(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t) {
  no_cuda();
}
void CudaStream::fill_rows(void*, std::size_t, int, std::size_t, std::size_t) { no_cuda(); }
void CudaStream::wait() { no_cuda(); }
void order(Device, Stream, Device, Stream) { no_cuda(); }

}  // namespace winnow::expert_parallel

#endif
