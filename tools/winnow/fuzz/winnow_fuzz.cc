// libFuzzer target: random tensor descriptors through the door of every operation, and random bytes
// through the text reader. Whatever comes in, the answer is a result or an Error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tools/winnow/demo/text_reader.h"

#include "winnow/core/error.h"
#include "winnow/winnow.h"

namespace {

using winnow::ConstTensorView;
using winnow::DType;
using winnow::TensorView;

// Hands out the fuzzer's bytes; zeros once they are used up.
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

  // Mostly small numbers, at times extreme ones.
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

// Memory that every descriptor points into, with room for small tensors on both sides. Descriptors
// that reach beyond are dropped: the library cannot know how large its caller's memory is.
constexpr std::int64_t kArenaBytes = 1 << 20;
alignas(64) char g_arena[kArenaBytes];

bool inside_arena(const ConstTensorView& view) {
  if (view.numel() == 0) return true;
  const auto begin = static_cast<const char*>(view.data()) - g_arena;
  std::int64_t low = 0, high = size_of(view.dtype());
  for (int dim = 0; dim < view.rank(); ++dim) {
    const std::int64_t reach =
        (view.size(dim) - 1) * view.stride(dim) * size_of(view.dtype());  // checked by the view
    (reach < 0 ? low : high) += reach;
  }
  return low >= -begin && high <= kArenaBytes - begin;  // the sums may leave the range of 64 bits
}

// A descriptor that often fits its place, or nothing.
TensorView descriptor(Bytes& bytes, DType dtype, std::vector<std::int64_t> shape) {
  const auto choice = bytes.take<std::uint8_t>();
  if (choice == 254) return {};
  if (choice > 0 && choice < 40) dtype = static_cast<DType>(choice % 7);
  if (choice % 16 == 1 && !shape.empty()) shape.pop_back();
  if (choice % 16 == 2) shape.push_back(bytes.number());
  if (choice % 8 == 3 && !shape.empty()) shape[choice % shape.size()] = bytes.number();
  const winnow::Device device{choice == 255 ? winnow::DeviceType::cuda : winnow::DeviceType::cpu,
                              0};
  char* data = g_arena + kArenaBytes / 2 + (choice % 8 == 4 ? bytes.take<std::int8_t>() : 0);
  try {
    TensorView view(data, dtype, shape, device);
    if (choice % 8 == 5) {
      std::vector<std::int64_t> strides(view.strides().begin(), view.strides().end());
      if (!strides.empty()) strides[bytes.take<std::uint8_t>() % strides.size()] = bytes.number();
      view = TensorView(data, dtype, shape, strides, device);
    }
    if (choice % 8 == 6) view = view.slice(int(bytes.number()), bytes.number(), bytes.number());
    if (choice % 8 == 7) view = view.transpose(int(bytes.number()), int(bytes.number()));
    return inside_arena(view) ? view : TensorView();
  } catch (const winnow::Error&) {
    return {};
  }
}

// Indices, lengths, slots and tables are the fuzzer's own bytes; outputs may overlap them, which is
// the caller's business.
void fill_arena(Bytes& bytes) {
  for (std::int64_t i = 0; i < 64; ++i) {
    reinterpret_cast<std::int32_t*>(g_arena + kArenaBytes / 2)[i] = bytes.take<std::int32_t>();
  }
}

template <class Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const winnow::Error&) {
  }
}

void fuzz_paged(Bytes& bytes) {
  using winnow::sparse_mla::CacheFormat;
  const std::int64_t b = bytes.number(), s_q = bytes.number(), h = bytes.number();
  const std::int64_t topk = bytes.number(), blocks = bytes.number(), block_size = bytes.number();
  const auto format = static_cast<CacheFormat>(bytes.take<std::uint8_t>() % 3);
  const bool plain = format == CacheFormat::bf16;
  const std::int64_t columns = format == CacheFormat::fp8_584 || bytes.flag() ? 512 : 576;
  const std::int64_t row = plain ? columns : format == CacheFormat::fp8_584 ? 584 : 656;
  const auto tensor = [&](DType type, std::vector<std::int64_t> shape) {
    return descriptor(bytes, type, std::move(shape));
  };
  fill_arena(bytes);
  const auto cache = [&] {
    return tensor(plain ? DType::bf16 : DType::u8, {blocks, block_size, 1, row});
  };
  attempt([&] {
    winnow::sparse_mla::decode({.q = tensor(DType::bf16, {b, s_q, h, columns}),
                                .cache = cache(),
                                .indices = tensor(DType::i32, {b, s_q, topk}),
                                .topk_length = tensor(DType::i32, {b}),
                                .extra_cache = bytes.flag() ? cache() : TensorView(),
                                .extra_indices = tensor(DType::i32, {b, s_q, topk}),
                                .attn_sink = tensor(DType::f32, {h}),
                                .format = format,
                                .out = tensor(DType::bf16, {b, s_q, h, 512}),
                                .lse = tensor(DType::f32, {b, s_q, h})});
  });
  attempt([&] {
    winnow::sparse_mla::store({.rows = tensor(DType::bf16, {b, columns}),
                               .slots = tensor(bytes.flag() ? DType::i64 : DType::i32, {b}),
                               .format = format,
                               .cache = cache()});
  });
  const std::int64_t d = bytes.flag() ? 128 : 64;
  attempt([&] {
    winnow::indexer::topk_paged({.q = tensor(DType::f8_e4m3, {b, s_q, h, d}),
                                 .pages = tensor(DType::u8, {blocks, 64 * (d + 4)}),
                                 .weights = tensor(DType::f32, {b, s_q, h}),
                                 .block_tables = tensor(DType::i32, {b, block_size}),
                                 .context_lens = tensor(DType::i32, {b}),
                                 .positions = bytes.flag(),
                                 .indices = tensor(DType::i32, {b, s_q, topk}),
                                 .length = tensor(DType::i32, {b, s_q}),
                                 .scores = tensor(DType::f32, {b, s_q, topk})});
  });
}

void fuzz_operations(Bytes& bytes) {
  const std::int64_t s_q = bytes.number(), h_q = bytes.number(), s_kv = bytes.number();
  const std::int64_t topk = bytes.number(), d_qk = bytes.flag() ? 512 : 576;
  const auto dtype = static_cast<DType>(bytes.take<std::uint8_t>() % 3);
  const auto tensor = [&](DType type, std::vector<std::int64_t> shape) {
    return descriptor(bytes, type, std::move(shape));
  };
  fill_arena(bytes);
  const TensorView q = tensor(dtype, {s_q, h_q, d_qk}), kv = tensor(dtype, {s_kv, 1, d_qk});
  const TensorView indices = tensor(DType::i32, {s_q, 1, topk});
  const TensorView length = tensor(DType::i32, {s_q}), sink = tensor(DType::f32, {h_q});
  const TensorView out = tensor(dtype, {s_q, h_q, 512}), lse = tensor(DType::f32, {s_q, h_q});
  const TensorView attn_sum = tensor(DType::f32, {s_q, topk});
  const TensorView dq = tensor(dtype, {s_q, h_q, d_qk}), dkv = tensor(dtype, {s_kv, 1, d_qk});
  std::optional<std::int64_t> q_start;
  if (bytes.flag()) q_start = bytes.number();
  const std::int64_t k_stride = bytes.number();
  attempt([&] {
    winnow::sparse_mla::forward({.q = q,
                                 .kv = kv,
                                 .indices = indices,
                                 .topk_length = length,
                                 .attn_sink = sink,
                                 .q_start = q_start,
                                 .k_stride = k_stride,
                                 .out = out,
                                 .lse = lse});
  });
  attempt([&] {
    winnow::sparse_mla::distribution({.q = q,
                                      .kv = kv,
                                      .indices = indices,
                                      .lse = lse,
                                      .topk_length = length,
                                      .q_start = q_start,
                                      .k_stride = k_stride,
                                      .attn_sum = attn_sum});
  });
  attempt([&] {
    winnow::sparse_mla::backward({.q = q,
                                  .kv = kv,
                                  .indices = indices,
                                  .out = out,
                                  .lse = lse,
                                  .d_out = out,
                                  .topk_length = length,
                                  .attn_sink = sink,
                                  .q_start = q_start,
                                  .k_stride = k_stride,
                                  .dq = dq,
                                  .dkv = dkv});
  });
}

void fuzz_text(const Bytes& bytes) {
  try {
    winnow::demo::parse_document(bytes.rest(), "fuzz", 4096);
  } catch (const winnow::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool single_threaded = [] {
    winnow::set_num_threads(1);
    return true;
  }();
  (void)single_threaded;
  Bytes bytes(data, size);
  switch (bytes.take<std::uint8_t>() % 4) {
    case 0:
      fuzz_text(bytes);
      break;
    case 1:
      fuzz_paged(bytes);
      break;
    default:
      fuzz_operations(bytes);
  }
  return 0;
}
