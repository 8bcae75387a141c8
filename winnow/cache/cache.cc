#include "winnow/cache/cache.h"

#include <limits>
#include <string>

#include "winnow/core/check.h"

namespace winnow::sparse_mla {
namespace {

constexpr CacheFormat kFormats[] = {CacheFormat::fp8_656, CacheFormat::fp8_584,
                                    CacheFormat::fp8_576, CacheFormat::bf16};

std::string shape_of(CacheFormat format) {
  switch (format) {
    case CacheFormat::fp8_656:
      return "[blocks, block_size, 1, 656]";
    case CacheFormat::fp8_584:
      return "[blocks, block_size, 1, 584]";
    case CacheFormat::fp8_576:
      return "[blocks, block_size, 1, 576]";
    case CacheFormat::bf16:
      return "[blocks, block_size, 1, 576 or 512]";
  }
  return "";
}

bool is_row(CacheFormat format, std::int64_t elements) {
  switch (format) {
    case CacheFormat::fp8_656:
      return elements == Row656::kBytes;
    case CacheFormat::fp8_584:
      return elements == Row584::kBytes;
    case CacheFormat::fp8_576:
      return elements == Row576::kBytes;
    case CacheFormat::bf16:
      return elements == 576 || elements == 512;
  }
  return false;
}

// Rows and blocks as the layout of fp8_584 needs them.
void check_strides_584(const Check& check, std::string_view argument, const ConstTensorView& view) {
  const std::int64_t blocks = view.size(0), block_size = view.size(1);
  if (view.numel() == 0) return;
  check.that(block_size == 1 || view.stride(1) == Row584::kBytes, argument,
             "rows 584 elements apart, the nominal layout of fp8_584",
             "a stride of " + std::to_string(view.stride(1)));
  const std::int64_t least = Row584::block_bytes(block_size);
  check.that(blocks == 1 || view.stride(0) >= least, argument,
             "blocks at least " + std::to_string(least) +
                 " bytes apart, which is block_size * 584 rounded up to a multiple of 576",
             "a stride of " + std::to_string(view.stride(0)));
}

// Bytes between two entries of a dimension. The stride of a single entry, or of none, may be any
// number.
std::int64_t step(const ConstTensorView& view, int dim) {
  const bool steps = view.size(dim) > 1 && view.numel() > 0;
  return steps ? view.stride(dim) * size_of(view.dtype()) : 0;
}

template <class Byte, class View>
Cache<Byte> checked(const Check& check, std::string_view argument, const View& view,
                    CacheFormat format, Device device) {
  const std::string shape = shape_of(format);
  check.rank(argument, view, 4, shape);
  check.that(is_row(format, view.size(3)), argument,
             shape + " for the format " + std::string(to_string(format)) +
                 " (fp8_656 has rows of 656 bytes, fp8_584 of 584, fp8_576 of 576, bf16 of 576 or "
                 "512 elements)",
             "a last dimension of " + std::to_string(view.size(3)));
  const std::int64_t blocks = view.size(0), block_size = view.size(1);
  check.shape(argument, view,
              {{"blocks", blocks}, {"block_size", block_size}, {"1", 1}, {"row", view.size(3)}});
  const bool plain = format == CacheFormat::bf16;
  if (plain) {
    check.dtype(argument, view, {DType::bf16});
  } else {
    check.dtype(argument, view, {DType::u8, DType::f8_e4m3});
  }
  check.device(argument, view, device);
  check.contiguous_rows(argument, view);
  check.aligned(argument, view, size_of(view.dtype()));
  constexpr std::int64_t kMostSlots = std::numeric_limits<std::int32_t>::max();
  check.that(block_size == 0 || blocks <= kMostSlots / block_size, argument,
             "at most 2^31 - 1 slots, the range of the indices",
             std::to_string(blocks) + " blocks of " + std::to_string(block_size));
  if (format == CacheFormat::fp8_584) check_strides_584(check, argument, view);

  return {.format = format,
          .data = static_cast<Byte*>(view.data()),
          .blocks = blocks,
          .block_size = block_size,
          .columns = cache_columns(format, view),
          .block_stride = step(view, 0),
          .row_stride = format == CacheFormat::fp8_584 ? Row584::kRowBytes : step(view, 1)};
}

}  // namespace

CacheFormat cache_format_from_string(std::string_view name) {
  for (const CacheFormat format : kFormats) {
    if (name == to_string(format)) return format;
  }
  throw Error(ErrorCode::invalid_argument, "cache_format_from_string", "format",
              "fp8_656, fp8_584, fp8_576 or bf16", std::string(name));
}

std::int64_t cache_columns(CacheFormat format, const ConstTensorView& cache) {
  switch (format) {
    case CacheFormat::fp8_656:
      return Row656::kColumns;
    case CacheFormat::fp8_584:
      return Row584::kColumns;
    case CacheFormat::fp8_576:
      return Row576::kColumns;
    case CacheFormat::bf16:
      return cache.size(3);
  }
  return 0;
}

Cache<const std::uint8_t> check_cache(const Check& check, std::string_view argument,
                                      const ConstTensorView& view, CacheFormat format,
                                      Device device) {
  return checked<const std::uint8_t>(check, argument, view, format, device);
}

Cache<std::uint8_t> check_cache_output(const Check& check, std::string_view argument,
                                       const TensorView& view, CacheFormat format, Device device) {
  const Cache<std::uint8_t> cache = checked<std::uint8_t>(check, argument, view, format, device);
  check.distinct_elements(argument, view);
  return cache;
}

void check_cache_for_gpu(const Check& check, std::string_view argument, const ConstTensorView& view,
                         CacheFormat format) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
  // The rows of fp8_584 are 576 bytes apart, whatever the nominal stride says.
  const bool nominal = format == CacheFormat::fp8_584 && view.size(1) > 1;
  check.aligned(argument, nominal ? view.slice(1, 0, 1) : view, kAlignment);
}

}  // namespace winnow::sparse_mla

namespace winnow::indexer {

KeyPages check_key_pages(const Check& check, std::string_view argument, const TensorView& view,
                         std::int64_t d, bool power_of_two, Device device) {
  check.rank(argument, view, 2, "[num_pages, 64 * (d + 4)]");
  const std::int64_t count = view.size(0);
  check.output(argument, view, {{"num_pages", count}, {"64 * (d + 4)", page_bytes(d)}}, {DType::u8},
               device);
  return {rows_of<std::uint8_t*>(view, 0), count, d, power_of_two};
}

void check_key_pages_for_gpu(const Check& check, std::string_view argument,
                             const TensorView& view) {
  check.aligned(argument, view, 4);  // the scales are f32
}

}  // namespace winnow::indexer
