#include "winnow/testing/generate.h"

#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/error.h"

namespace winnow::testing {
namespace {

// Calls visit(address of the first element, elements, stride in elements) for every row.
template <class Visit>
void for_each_row(char* data, const ConstTensorView& view, int dim, const Visit& visit) {
  if (view.numel() == 0) return;
  if (dim + 1 >= view.rank()) {
    const bool scalar = view.rank() == 0;
    return visit(data, scalar ? 1 : view.size(dim), scalar ? 1 : view.stride(dim));
  }
  for (std::int64_t i = 0; i < view.size(dim); ++i) {
    for_each_row(data + i * view.stride(dim) * size_of(view.dtype()), view, dim + 1, visit);
  }
}

template <class Visit>
void for_each_row(const TensorView& view, const Visit& visit) {
  if (view.device().type != DeviceType::cpu) {
    throw Error(ErrorCode::invalid_argument, "testing::fill", "view", "a tensor on the host",
                to_string(view));
  }
  for_each_row(static_cast<char*>(view.data()), view, 0, visit);
}

template <class T, class Make>
void fill_as(const TensorView& view, const Make& make) {
  for_each_row(view, [&](char* row, std::int64_t count, std::int64_t stride) {
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<T, double>) {
        reinterpret_cast<T*>(row)[i * stride] = make();
      } else {
        reinterpret_cast<T*>(row)[i * stride] = T(static_cast<float>(make()));
      }
    }
  });
}

template <class Make>
void fill_with(const TensorView& view, const Make& make) {
  switch (view.dtype()) {
    case DType::f64:
      return fill_as<double>(view, make);
    case DType::f32:
      return fill_as<float>(view, make);
    case DType::f16:
      return fill_as<Half>(view, make);
    case DType::bf16:
      return fill_as<BFloat16>(view, make);
    case DType::f8_e4m3:
      return fill_as<Float8E4M3>(view, make);
    default:
      throw Error(ErrorCode::invalid_argument, "testing::fill", "view", "a float dtype",
                  std::string(to_string(view.dtype())));
  }
}

void require_i32(const TensorView& view) {
  if (view.dtype() == DType::i32) return;
  throw Error(ErrorCode::invalid_argument, "testing::fill", "view", "dtype i32",
              std::string(to_string(view.dtype())));
}

}  // namespace

std::uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

double Random::normal() {
  // Eight 16-bit numbers: the sum has mean 4 * 65535 and variance 8 * (65536^2 - 1) / 12.
  constexpr double kMean = 4 * 65535.0;
  constexpr double kDeviation = 53509.91992145008;
  std::uint64_t sum = 0;
  for (int word = 0; word < 2; ++word) {
    const std::uint64_t bits = next();
    for (int part = 0; part < 4; ++part) sum += (bits >> (16 * part)) & 0xffff;
  }
  return (static_cast<double>(sum) - kMean) / kDeviation;
}

std::int64_t Random::below(std::int64_t count) {
  const std::uint64_t scaled = (next() >> 32) * static_cast<std::uint64_t>(count);
  return static_cast<std::int64_t>(scaled >> 32);
}

std::uint64_t seed_from(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  }
  return hash;
}

void fill_normal(const TensorView& view, Random& random, double deviation) {
  fill_with(view, [&] { return deviation * random.normal(); });
}

void fill_uniform(const TensorView& view, Random& random, double low, double high) {
  fill_with(view, [&] { return low + (high - low) * random.uniform(); });
}

void fill(const TensorView& view, double value) {
  fill_with(view, [value] { return value; });
}

void fill(const TensorView& view, std::span<const double> values) {
  const double* value = values.data();
  fill_with(view, [&value] { return *value++; });
}

void fill_normal_rows(const TensorView& view, Random& random) {
  constexpr std::int64_t kBlock = 1 << 20;
  const std::int64_t columns = view.size(view.rank() - 1);
  Tensor block(view.dtype(), {kBlock + columns});
  fill_normal(block, random);
  const std::int64_t bytes = size_of(view.dtype());
  for_each_row(view, [&](char* row, std::int64_t count, std::int64_t) {
    std::memcpy(row, static_cast<const char*>(block.data()) + random.below(kBlock) * bytes,
                static_cast<std::size_t>(count * bytes));
  });
}

void fill_unwritten(const TensorView& view) {
  const std::int64_t bytes = size_of(view.dtype());
  for_each_row(view, [bytes](char* row, std::int64_t count, std::int64_t stride) {
    if (stride == 1) {
      std::memset(row, 0xff, static_cast<std::size_t>(count * bytes));
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::memset(row + i * stride * bytes, 0xff, static_cast<std::size_t>(bytes));
    }
  });
}

namespace {
// Of elements as wide as Bits.
template <class Bits>
std::int64_t count_unwritten_as(const ConstTensorView& view) {
  std::int64_t unwritten = 0;
  // The rows are only read.
  char* data = static_cast<char*>(const_cast<void*>(view.data()));
  for_each_row(data, view, 0, [&](const char* row, std::int64_t count, std::int64_t stride) {
    for (std::int64_t i = 0; i < count; ++i) {
      Bits bits;
      std::memcpy(&bits, row + i * stride * std::int64_t{sizeof bits}, sizeof bits);
      unwritten += bits == static_cast<Bits>(-1);
    }
  });
  return unwritten;
}
}  // namespace

std::int64_t count_unwritten(const ConstTensorView& view) {
  switch (size_of(view.dtype())) {
    case 1:
      return count_unwritten_as<std::uint8_t>(view);
    case 2:
      return count_unwritten_as<std::uint16_t>(view);
    case 4:
      return count_unwritten_as<std::uint32_t>(view);
    default:
      return count_unwritten_as<std::uint64_t>(view);
  }
}

void fill_distinct(const TensorView& view, Random& random, std::int64_t count) {
  require_i32(view);
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  for_each_row(view, [&](char* row, std::int64_t length, std::int64_t stride) {
    if (length > count) {
      throw Error(ErrorCode::invalid_argument, "testing::fill_distinct", "count",
                  std::to_string(length) + " or more", std::to_string(count));
    }
    // The start of a Fisher-Yates shuffle; whatever order the last row left behind is fine.
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int64_t other = i + random.below(count - i);
      std::swap(numbers[static_cast<std::size_t>(i)], numbers[static_cast<std::size_t>(other)]);
      reinterpret_cast<std::int32_t*>(row)[i * stride] = numbers[static_cast<std::size_t>(i)];
    }
  });
}

Tensor make_slots(DType dtype, std::int64_t count, std::int64_t slots, bool skipped, Random& random,
                  bool ascending) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(slots));
  std::iota(order.begin(), order.end(), 0);
  if (!ascending) shuffle(std::span(order), random);
  Tensor result(dtype, {count});
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t slot =
        skipped && i % 3 == 0 ? -1 - i % 2 : order[static_cast<std::size_t>(i)];
    if (dtype == DType::i64) {
      result.view().at<std::int64_t>(i) = slot;
    } else {
      result.view().at<std::int32_t>(i) = static_cast<std::int32_t>(slot);
    }
  }
  return result;
}

void fill_below(const TensorView& view, Random& random, std::int64_t count) {
  require_i32(view);
  for_each_row(view, [&](char* row, std::int64_t length, std::int64_t stride) {
    for (std::int64_t i = 0; i < length; ++i) {
      reinterpret_cast<std::int32_t*>(row)[i * stride] =
          static_cast<std::int32_t>(random.below(count));
    }
  });
}

}  // namespace winnow::testing
