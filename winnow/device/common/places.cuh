// Typed places in shared memory: a kernel lays its shared memory out as a struct, and names a place
// in it as shared.full()[slot][group], which is a 32-bit address that knows its type. Objects by
// reference would be 64-bit pointers, which cost forward 3 % more code. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/shared.cuh"

namespace winnow::device {

// Where a T lies.
template <class T>
struct Place {
  std::uint32_t address;

  // As of a pointer. A lane's own place once, and constants behind it: as sums in [] they cost an
  // instruction or two each.
  __device__ Place operator+(int n) const {
    return {address + n * static_cast<std::uint32_t>(sizeof(T))};
  }

  __device__ __forceinline__ T load() const { return ld_shared<T>(address); }
  __device__ __forceinline__ void store(T value) const { st_shared(address, value); }
};

template <class T, std::size_t kCount>
struct Place<T[kCount]> {
  std::uint32_t address;

  __device__ Place<T> operator[](int i) const {
    return {address + i * static_cast<std::uint32_t>(sizeof(T))};
  }
};

// Of an object that is known by reference.
template <class T>
__device__ Place<T> place_of(const T& object) {
  return {shared_address(&object)};
}

// Shared memory that begins at `base` and is laid out as Memory_. A kernel derives its own struct,
// with a line WINNOW_PLACE(full) for each member.
template <class Memory_>
struct Shared {
  using Memory = Memory_;
  std::uint32_t base;

  // Bytes from the base, as descriptors count.
  template <class T>
  __device__ __forceinline__ std::uint32_t offset(Place<T> place) const {
    return place.address - base;
  }
};
#define WINNOW_PLACE(member)                                                \
  __device__ auto member() const {                                          \
    return ::winnow::device::Place<decltype(Memory::member)>{               \
        this->base + static_cast<std::uint32_t>(offsetof(Memory, member))}; \
  }

}  // namespace winnow::device
