// Small arrays of a GPU where the host can read them. Internal.
#pragma once

#include <cstdint>
#include <vector>

#include "winnow/core/device_memory.h"

namespace winnow {

// Numbers where the host can read them: the memory itself, or for a GPU a copy, for which it waits
// for the stream.
template <class T>
class OnHost {
 public:
  OnHost(const T* data, std::int64_t count, Device device, Stream stream) : data_(data) {
    if (device.type == DeviceType::cpu || count == 0) return;
    copy_.resize(static_cast<std::size_t>(count));
    synchronize(device, stream);
    copy_between(copy_.data(), {}, data, device, copy_.size() * sizeof(T));
    data_ = copy_.data();
  }
  const T* data() const { return data_; }

 private:
  const T* data_;
  std::vector<T> copy_;
};

}  // namespace winnow
