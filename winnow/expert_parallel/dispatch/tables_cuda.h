// Tables of a call or a descriptor in the memory of a GPU. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "winnow/expert_parallel/arena.h"
#include "winnow/expert_parallel/device/device_layer.h"

namespace winnow::expert_parallel {

// Tables one after the other in one memory: where each begins. First they are only measured.
class Tables {
 public:
  explicit Tables(std::byte* memory = nullptr) : memory_(memory) {}
  template <class T>
  void add(T*& table, std::int64_t count) {
    if (memory_ != nullptr) table = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += Arena::round_up(count * std::int64_t(sizeof(T)));
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::int64_t bytes_ = 0;
};

// add(tables) says which tables there are.
template <class Add>
std::shared_ptr<Region> keep_tables(DeviceLayer& layer, const Add& add) {
  Tables measured;
  add(measured);
  std::shared_ptr<Region> memory = layer.keep(measured.bytes());
  Tables tables(memory->data());
  add(tables);
  return memory;
}

}  // namespace winnow::expert_parallel
