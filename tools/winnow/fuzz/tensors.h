// Builds tensors of all shapes, dtypes and strides from a fuzzer's bytes. Only for the fuzz target.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/core/tensor.h"

namespace winnow::fuzz {

// Takes values from the fuzzer's bytes, and zeros once these are used up.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(sizeof(T), size_);
    if (count != 0) std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }

  bool flag() { return take<std::uint8_t>() % 2 != 0; }

  // Mostly small numbers, sometimes extreme ones.
  std::int64_t number() {
    const auto kind = take<std::uint8_t>();
    if (kind < 190) return 1 + kind % 4;
    if (kind < 200) return 0;
    if (kind < 225) return take<std::int16_t>();
    if (kind < 245) return kind % 2 == 0 ? 512 : 576;
    return take<std::int64_t>();
  }

  std::span<const char> rest() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

// The tensors of one call. Each has a block of memory of exactly its size, so that AddressSanitizer
// detects an access to the first byte behind it. Sometimes a tensor shares the block of the
// previous one, as by a caller's mistake.
class Tensors {
 public:
  explicit Tensors(Bytes& bytes) : bytes_(bytes) {}

  // A tensor of this dtype and shape, or if it may be `altered` often another or an absent one. A
  // tensor of more than 1 MiB becomes absent: it would need real memory, since the library trusts
  // the size in a view.
  TensorView operator()(DType dtype, std::vector<std::int64_t> shape, bool altered) {
    const auto choice = altered ? bytes_.take<std::uint8_t>() : std::uint8_t{0};
    if (choice == 254) return {};
    if (choice > 0 && choice < 40) dtype = static_cast<DType>(choice % 8);
    if (choice % 16 == 1 && !shape.empty()) shape.pop_back();
    if (choice % 16 == 2) shape.push_back(bytes_.number());
    if (choice % 8 == 3 && !shape.empty()) shape[choice % shape.size()] = bytes_.number();
    const Device device{choice == 255 ? DeviceType::cuda : DeviceType::cpu, 0};
    try {
      // Memory is allocated when the strides are known. Nothing reads this address until then.
      char* const nowhere = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
      TensorView view(nowhere, dtype, shape, device);
      if (choice % 8 == 5) {
        std::vector<std::int64_t> strides(view.strides().begin(), view.strides().end());
        if (!strides.empty()) strides[bytes_.take<std::uint8_t>() % strides.size()] = stride();
        view = TensorView(nowhere, dtype, shape, strides, device);
      }
      if (choice % 8 == 7) view = view.transpose(int(bytes_.number()), int(bytes_.number()));
      char* const data = place(view, choice % 8 == 4 ? bytes_.take<std::uint8_t>() % 16 : 0,
                               choice % 8 == 6 && bytes_.flag());
      if (data == nullptr) return {};
      view = TensorView(data, dtype, view.shape(), view.strides(), device);
      if (choice % 8 == 6)
        view = view.slice(int(bytes_.number()), bytes_.number(), bytes_.number());
      return view;
    } catch (const Error&) {
      return {};
    }
  }

 private:
  static constexpr std::int64_t kLimit = 1 << 20;

  std::int64_t stride() { return bytes_.flag() ? bytes_.number() : bytes_.take<std::int8_t>(); }

  // Allocates memory for the view and returns the address of element 0, `offset` bytes after an
  // aligned address (for positive strides), or null if it would exceed kLimit.
  char* place(const TensorView& view, std::int64_t offset, bool in_the_last) {
    const std::int64_t element = size_of(view.dtype());
    std::int64_t low = 0, high = view.numel() == 0 ? 0 : element;
    for (int dim = 0; dim < view.rank() && view.numel() != 0; ++dim) {
      const std::int64_t reach = (view.size(dim) - 1) * view.stride(dim) * element;  // fits 63 bits
      if (reach < -kLimit || reach > kLimit) return nullptr;
      (reach < 0 ? low : high) += reach;
    }
    const auto size = static_cast<std::size_t>(high - low + offset);
    if (in_the_last && !blocks_.empty() && blocks_.back().size >= size) {
      return blocks_.back().memory.get() + offset - low;
    }
    blocks_.push_back({std::make_unique<char[]>(size), size});
    char* const memory = blocks_.back().memory.get();
    fill(memory, size, view.dtype());
    return memory + offset - low;
  }

  // Repeats a pattern of eight elements of random bits; half of the integers are small numbers.
  void fill(char* memory, std::size_t size, DType dtype) {
    char pattern[8 * sizeof(std::int64_t)] = {};
    const std::size_t element = static_cast<std::size_t>(size_of(dtype));
    const bool integers = dtype == DType::i32 || dtype == DType::i64;
    for (std::size_t at = 0; at < 8 * element; at += element) {
      const std::int64_t value =
          integers && bytes_.flag() ? bytes_.take<std::int8_t>() % 8 : bytes_.take<std::int64_t>();
      std::memcpy(pattern + at, &value, element);
    }
    for (std::size_t at = 0; at < size; at += 8 * element) {
      std::memcpy(memory + at, pattern, std::min(8 * element, size - at));
    }
  }

  struct Block {
    std::unique_ptr<char[]> memory;
    std::size_t size;
  };
  Bytes& bytes_;
  std::vector<Block> blocks_;
};

// The call must return, or throw an Error that names the operation and, if an argument is invalid,
// the argument.
template <class Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    const bool named = !error.operation().empty() &&
                       (error.code() != ErrorCode::invalid_argument || !error.argument().empty());
    if (named && error.code() != ErrorCode::internal) return;
    std::fprintf(stderr, "an error without a name: %s\n", error.what());
    std::abort();
  }
}

}  // namespace winnow::fuzz
