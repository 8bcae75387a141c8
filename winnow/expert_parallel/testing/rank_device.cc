#include "winnow/expert_parallel/testing/rank_device.h"

#include <cstring>

#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

std::int64_t rows_of(const ConstTensorView& view) { return view.rank() > 0 ? view.size(0) : 1; }

std::int64_t row_bytes(const ConstTensorView& view) {
  const std::int64_t rows = rows_of(view);
  return rows == 0 ? 0 : view.numel() / rows * size_of(view.dtype());
}

// Bytes from one row to the next.
std::int64_t pitch(const ConstTensorView& view) {
  return rows_of(view) < 2 ? row_bytes(view) : view.stride(0) * size_of(view.dtype());
}

void copy_on_host(const TensorView& to, const ConstTensorView& from) {
  auto* target = static_cast<char*>(to.data());
  const auto* source = static_cast<const char*>(from.data());
  const std::int64_t bytes = row_bytes(from);
  for (std::int64_t row = 0; bytes > 0 && row < rows_of(from); ++row) {
    std::memcpy(target + row * pitch(to), source + row * pitch(from),
                static_cast<std::size_t>(bytes));
  }
}

}  // namespace

struct RankDevice::Queue {
  CudaStream stream;

  void copy(const TensorView& to, const ConstTensorView& from) {
    if (row_bytes(from) == 0) return;
    stream.copy_rows(to.data(), std::size_t(pitch(to)), from.data(), std::size_t(pitch(from)),
                     std::size_t(row_bytes(from)), std::size_t(rows_of(from)));
  }
};

RankDevice::RankDevice(Device device) : device_(device) {
  if (on_gpu()) queue_ = std::make_unique<Queue>(Queue{CudaStream(device)});
}

RankDevice::~RankDevice() = default;

Stream RankDevice::stream() const { return queue_ ? queue_->stream.stream() : Stream{}; }

void RankDevice::wait() const {
  if (queue_) queue_->stream.wait();
}

Tensor RankDevice::make(DType dtype, std::span<const std::int64_t> shape) const {
  Tensor tensor;
  if (!on_gpu()) {
    tensor = Tensor(dtype, shape);
  } else {
    std::int64_t bytes = size_of(dtype);
    for (const std::int64_t size : shape) bytes *= size;
    const auto memory = allocate_cuda_memory(device_, static_cast<std::size_t>(bytes) + 1);
    tensor = Tensor::borrow(memory, memory.get(), dtype, shape, device_);
  }
  spoil(tensor.view());
  return tensor;
}

Tensor RankDevice::copy(const ConstTensorView& from_host) const {
  Tensor tensor = make(from_host.dtype(), from_host.shape());
  write(tensor, from_host);
  wait();
  return tensor;
}

Tensor RankDevice::to_host(const ConstTensorView& from) const {
  Tensor tensor(from.dtype(), from.shape());
  wait();
  on_gpu() ? queue_->copy(tensor.view(), from) : copy_on_host(tensor.view(), from);
  wait();
  return tensor;
}

void RankDevice::write(const TensorView& to, const ConstTensorView& from) const {
  on_gpu() ? queue_->copy(to, from) : copy_on_host(to, from);
}

void RankDevice::spoil(const TensorView& rows) const {
  if (rows.numel() == 0) return;
  if (!on_gpu()) return testing::fill_unwritten(rows);
  queue_->stream.fill_rows(rows.data(), std::size_t(pitch(rows)), 0xff,
                           std::size_t(row_bytes(rows)), std::size_t(rows_of(rows)));
}

}  // namespace winnow::expert_parallel
