// Where the tensors of a rank live in tests and benchmarks, the CPU or a GPU, and how they get
// there and back without waiting for other ranks' work on the same GPU.
#pragma once

#include <memory>

#include "winnow/core/device.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel {

// Where the tensors of one rank live; on a GPU it has a stream of its own.
class RankDevice {
 public:
  explicit RankDevice(Device device = {});
  ~RankDevice();
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;

  Device device() const { return device_; }
  bool on_gpu() const { return device_.type == DeviceType::cuda; }
  Stream stream() const;
  void wait() const;  // for all work on the stream

  // A dense tensor here: in a new one every bit is 1.
  Tensor make(DType dtype, std::span<const std::int64_t> shape) const;
  Tensor copy(const ConstTensorView& from_host) const;
  // A dense copy on the host of a tensor here with rows of any stride; waits for the stream.
  Tensor to_host(const ConstTensorView& from) const;
  // Copies in stream order; `from` must live on the host until the stream has copied it.
  void write(const TensorView& to, const ConstTensorView& from) const;
  // Sets every bit of the rows, in stream order.
  void spoil(const TensorView& rows) const;

 private:
  struct Queue;
  Device device_;
  std::unique_ptr<Queue> queue_;
};

}  // namespace winnow::expert_parallel
