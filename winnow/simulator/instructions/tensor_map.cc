#include "winnow/simulator/instructions/tensor_map.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "winnow/simulator/instructions/matrix_descriptor.h"
#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {
namespace {

constexpr const char* kEncoding = "tensor map";
constexpr const char* kCopy = "tensor copy";

constexpr std::uint32_t bytes_of(TensorElement element) {
  switch (element) {
    case TensorElement::u8:
      return 1;
    case TensorElement::u16:
    case TensorElement::f16:
    case TensorElement::bf16:
      return 2;
    case TensorElement::u32:
    case TensorElement::i32:
    case TensorElement::f32:
    case TensorElement::f32_ftz:
    case TensorElement::tf32:
    case TensorElement::tf32_ftz:
      return 4;
    case TensorElement::u64:
    case TensorElement::i64:
    case TensorElement::f64:
      return 8;
  }
  return 0;
}

constexpr bool is_floating(TensorElement element) {
  return element == TensorElement::f16 || element == TensorElement::bf16 ||
         element >= TensorElement::f32_ftz || element == TensorElement::f32 ||
         element == TensorElement::f64;
}

constexpr std::uint32_t swizzle_bytes(TensorSwizzle swizzle) {
  return swizzle == TensorSwizzle::none ? 16u : 16u << static_cast<int>(swizzle);
}

// Throws unless `holds`, naming entry `i` of an array and its value.
void require_entry(bool holds, const char* array, std::size_t i, std::uint64_t value,
                   const char* wanted) {
  require(holds, kEncoding, [&] {
    return std::string(array) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
           ", which must be " + wanted;
  });
}

void check(const TensorDescription& given) {
  const std::size_t rank = given.size.size();
  require(bytes_of(given.element) != 0, kEncoding,
          [] { return "the type of the elements is not known"; });
  require(given.interleave <= TensorInterleave::bytes32 &&
              given.swizzle <= TensorSwizzle::bytes128 && given.fill <= TensorFill::nan,
          kEncoding, [] { return "the interleave, swizzle or fill is not one of those of sm90"; });
  require(rank >= 1 && rank <= kMaxTensorRank, kEncoding,
          [&] { return "the rank is " + std::to_string(rank) + ", which must be 1 to 5"; });
  require(
      given.strides.size() == rank - 1 && given.box.size() == rank && given.steps.size() == rank,
      kEncoding,
      [] { return "strides, box and steps have not as many entries as the rank asks for"; });
  const bool interleaved = given.interleave != TensorInterleave::none;
  require(!interleaved || rank >= 3, kEncoding,
          [] { return "an interleaved layout needs three dimensions"; });
  const std::uint64_t alignment = given.interleave == TensorInterleave::bytes32 ? 32 : 16;
  require_aligned(reinterpret_cast<std::uintptr_t>(given.address), alignment, kEncoding,
                  "the tensor's address");
  for (std::size_t i = 0; i < rank; ++i) {
    const std::uint64_t size = given.size[i], box = given.box[i], step = given.steps[i];
    require_entry(size >= 1 && size <= std::uint64_t{1} << 32, "size", i, size, "1 to 2^32");
    require_entry(box >= 1 && box <= 256, "box", i, box, "1 to 256");
    if (i > 0 || interleaved) require_entry(step >= 1 && step <= 8, "steps", i, step, "1 to 8");
    if (i == 0) continue;
    const std::uint64_t stride = given.strides[i - 1];
    require_entry(stride % alignment == 0, "strides", i - 1, stride,
                  alignment == 32 ? "a multiple of 32" : "a multiple of 16");
    require_entry(stride < std::uint64_t{1} << 40, "strides", i - 1, stride, "less than 2^40");
  }
  const std::uint32_t row = given.box[0] * bytes_of(given.element);
  if (!interleaved) {
    require(row % 16 == 0, kEncoding, [&] {
      return "a row of the box has " + std::to_string(row) + " bytes, which is no multiple of 16";
    });
    require(given.swizzle == TensorSwizzle::none || row <= swizzle_bytes(given.swizzle), kEncoding,
            [&] {
              return "a row of the box has " + std::to_string(row) + " bytes, more than the " +
                     std::to_string(swizzle_bytes(given.swizzle)) + " of the swizzle";
            });
  }
  require(given.interleave != TensorInterleave::bytes32 || given.swizzle == TensorSwizzle::bytes32,
          kEncoding, [] { return "the interleave of 32 bytes needs the swizzle of 32 bytes"; });
  require(given.fill == TensorFill::zeros || is_floating(given.element), kEncoding,
          [] { return "NaN as fill needs elements of a floating type"; });
}

void check_encoded(const TensorMap& map) {
  require(map.valid == TensorMap::kValid, kCopy,
          [] { return "the map was not encoded, or its bytes are damaged"; });
}

// Elements of dimension i that a box holds.
std::uint32_t box_count(const TensorMap& map, int i) {
  const auto at = static_cast<std::size_t>(i);
  const std::uint32_t step = i == 0 ? 1 : map.steps[at];  // the step of dimension 0 is ignored
  return (map.box[at] + step - 1) / step;
}

}  // namespace

TensorMap encode_tensor_map(const TensorDescription& description) {
  check(description);
  TensorMap map{};
  map.valid = TensorMap::kValid;
  map.rank = static_cast<std::uint8_t>(description.size.size());
  map.element = description.element;
  map.interleave = description.interleave;
  map.swizzle = description.swizzle;
  map.fill = description.fill;
  map.address = static_cast<const std::byte*>(description.address);
  for (std::size_t i = 0; i < map.rank; ++i) {
    map.size[i] = description.size[i];
    map.strides[i] = i == 0 ? bytes_of(map.element) : description.strides[i - 1];
    map.box[i] = static_cast<std::uint16_t>(description.box[i]);
    map.steps[i] = static_cast<std::uint8_t>(description.steps[i]);
  }
  return map;
}

std::uint32_t box_bytes(const TensorMap& map) {
  check_encoded(map);
  std::uint32_t bytes = bytes_of(map.element);
  for (int i = 0; i < map.rank; ++i) bytes *= box_count(map, i);
  return bytes;
}

void BoxUnit::write(std::byte* to) const {
  std::memset(to, 0, 16);
  if (bytes > 0) std::memcpy(to + skip, global, static_cast<std::size_t>(bytes));
}

std::vector<BoxUnit> box_units(const TensorMap& map, std::span<const std::int32_t> coordinates,
                               std::uint32_t destination) {
  check_encoded(map);
  require(coordinates.size() == map.rank, kCopy, [&] {
    return std::to_string(coordinates.size()) + " coordinates for a tensor of rank " +
           std::to_string(map.rank);
  });
  require_aligned(destination, 128, kCopy, "the destination");
  const std::int64_t element = bytes_of(map.element), row_bytes = map.box[0] * element;
  const std::uint32_t width = swizzle_bytes(map.swizzle);
  const auto unmodelled = [](bool absent, const char* what) {
    require(absent, kCopy, [&] { return std::string("the simulator does not model ") + what; });
  };
  unmodelled(map.interleave == TensorInterleave::none, "interleaved layouts");
  unmodelled(map.fill == TensorFill::zeros, "NaN as fill");
  unmodelled(map.element < TensorElement::f32_ftz, "elements that the copy rounds or flushes");
  unmodelled(map.swizzle == TensorSwizzle::none || row_bytes == width,
             "rows narrower than the swizzle");
  // The part of a row that lies inside of the tensor, in bytes from the row's begin.
  const std::int64_t left = coordinates[0] * element;
  require(left % 16 == 0, kCopy, [&] {
    return "the box begins " + std::to_string(left) +
           " bytes into a row, which is no multiple of 16";
  });
  const std::int64_t inside_begin = std::clamp<std::int64_t>(-left, 0, row_bytes);
  const std::int64_t inside_end = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(map.size[0]) * element - left, inside_begin, row_bytes);
  std::vector<BoxUnit> units;
  units.reserve(box_bytes(map) / 16);
  const auto add_row = [&](const std::byte* row, bool inside) {
    for (std::int64_t at = 0; at < row_bytes; at += 16) {
      const auto address = destination + 16 * static_cast<std::uint32_t>(units.size());
      BoxUnit unit{swizzled(address, static_cast<int>(width)), 0, 0, nullptr};
      const std::int64_t begin = std::max(inside_begin, at), end = std::min(inside_end, at + 16);
      if (inside && begin < end) {
        unit.skip = static_cast<int>(begin - at);
        unit.bytes = static_cast<int>(end - begin);
        unit.global = row + (left + begin);
      }
      units.push_back(unit);
    }
  };
  // All rows: dimension 1 runs fastest.
  std::array<std::uint32_t, kMaxTensorRank> count{};
  for (;;) {
    const std::byte* row = map.address;
    bool inside = true;
    for (std::size_t i = 1; i < map.rank; ++i) {
      const std::int64_t at = coordinates[i] + std::int64_t{count[i]} * map.steps[i];
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.size[i]);
      if (inside) row += at * static_cast<std::int64_t>(map.strides[i]);
    }
    add_row(row, inside);
    int i = 1;
    for (; i < map.rank; ++i) {
      auto& here = count[static_cast<std::size_t>(i)];
      if (++here < box_count(map, i)) break;
      here = 0;
    }
    if (i >= map.rank) return units;
  }
}

std::vector<BoxUnit> gather4_units(const TensorMap& map,
                                   std::span<const std::int32_t, 5> coordinates,
                                   std::uint32_t destination) {
  check_encoded(map);
  require(map.rank == 2 && map.box[1] == 1, kCopy,
          [] { return "gather4 needs a map of rank 2 with boxes of one row"; });
  require_aligned(destination, 128, kCopy, "the destination");
  const std::uint32_t row_bytes = box_bytes(map), width = swizzle_bytes(map.swizzle);
  std::vector<BoxUnit> units;
  for (std::uint32_t row = 0; row < 4; ++row) {
    const std::int32_t at[] = {coordinates[0], coordinates[row + 1]};
    for (BoxUnit unit : box_units(map, at, 0)) {
      // unit.shared is the offset in the row: with destination 0 the swizzle changes no address.
      unit.shared = swizzled(destination + row * row_bytes + unit.shared, static_cast<int>(width));
      units.push_back(unit);
    }
  }
  return units;
}

}  // namespace winnow::simulator
