#include "winnow/expert_parallel/testing/place.h"

#include <cstring>

#include "winnow/expert_parallel/device/gpu_memory.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

std::int64_t rows_of(const ConstTensorView& view) { return view.rank() > 0 ? view.size(0) : 1; }

std::int64_t row_bytes(const ConstTensorView& view) {
  const std::int64_t rows = rows_of(view);
  return rows == 0 ? 0 : view.numel() / rows * size_of(view.dtype());
}

template <class Void>
auto* row_at(const BasicTensorView<Void>& view, std::int64_t i) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  const std::int64_t stride = view.rank() > 0 ? view.stride(0) : 0;
  return static_cast<Byte*>(view.data()) + i * stride * size_of(view.dtype());
}

bool dense(const ConstTensorView& view) {
  return rows_of(view) < 2 || view.stride(0) * size_of(view.dtype()) == row_bytes(view);
}

// visit(row, count): all rows at once where both are dense.
template <class Visit>
void for_rows(const ConstTensorView& a, const ConstTensorView& b, const Visit& visit) {
  const std::int64_t rows = rows_of(a);
  if (row_bytes(a) == 0) return;
  const std::int64_t step = dense(a) && dense(b) ? rows : 1;
  for (std::int64_t row = 0; row < rows; row += step) visit(row, step * row_bytes(a));
}

}  // namespace

struct Place::Queue {
  GpuStream stream;
};

Place::Place(Device device) : device_(device) {
  if (on_gpu()) queue_ = std::make_unique<Queue>(Queue{GpuStream(device)});
}

Place::~Place() = default;

Stream Place::stream() const { return queue_ ? queue_->stream.stream() : Stream{}; }

void Place::wait() const {
  if (queue_) queue_->stream.wait();
}

Tensor Place::make(DType dtype, std::span<const std::int64_t> shape) const {
  Tensor tensor;
  if (!on_gpu()) {
    tensor = Tensor(dtype, shape);
  } else {
    std::int64_t bytes = size_of(dtype);
    for (const std::int64_t size : shape) bytes *= size;
    const auto memory = allocate_on_gpu(device_, static_cast<std::size_t>(bytes) + 1);
    tensor = Tensor::borrow(memory, memory.get(), dtype, shape, device_);
  }
  spoil(tensor.view());
  return tensor;
}

Tensor Place::copy(const ConstTensorView& from_host) const {
  Tensor tensor = make(from_host.dtype(), from_host.shape());
  write(tensor, from_host);
  wait();
  return tensor;
}

Tensor Place::to_host(const ConstTensorView& from) const {
  Tensor tensor(from.dtype(), from.shape());
  wait();
  for_rows(from, tensor.view(), [&](std::int64_t row, std::int64_t bytes) {
    char* to = row_at(tensor.view(), row);
    if (on_gpu()) {
      queue_->stream.copy(to, row_at(from, row), static_cast<std::size_t>(bytes));
    } else {
      std::memcpy(to, row_at(from, row), static_cast<std::size_t>(bytes));
    }
  });
  wait();
  return tensor;
}

void Place::write(const TensorView& to, const ConstTensorView& from) const {
  for_rows(to, from, [&](std::int64_t row, std::int64_t bytes) {
    if (on_gpu()) {
      queue_->stream.copy(row_at(to, row), row_at(from, row), static_cast<std::size_t>(bytes));
    } else {
      std::memcpy(row_at(to, row), row_at(from, row), static_cast<std::size_t>(bytes));
    }
  });
}

void Place::spoil(const TensorView& rows) const {
  if (rows.numel() == 0) return;
  if (!on_gpu()) return testing::fill_unwritten(rows);
  for_rows(rows, rows, [&](std::int64_t row, std::int64_t bytes) {
    queue_->stream.fill(row_at(rows, row), 0xff, static_cast<std::size_t>(bytes));
  });
}

}  // namespace winnow::expert_parallel
