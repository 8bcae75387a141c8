#include "winnow/sparse_mla/decode/decode_step_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "winnow/cache/cache_oracle.h"

namespace winnow::sparse_mla {
namespace {

using testing::Random;

// What one of the two caches of a case has.
struct Part {
  std::int64_t blocks, block_size, topk;
};

void put(std::vector<std::uint8_t>& row, std::size_t at, std::uint32_t bits, int bytes) {
  for (int byte = 0; byte < bytes; ++byte) {
    row[at + static_cast<std::size_t>(byte)] = static_cast<std::uint8_t>(bits >> (8 * byte));
  }
}

void put_brain(std::vector<std::uint8_t>& row, std::size_t from, std::size_t end, Random& random) {
  for (std::size_t at = from; at < end; at += 2) {
    put(row, at, BFloat16(static_cast<float>(random.normal())).bits, 2);
  }
}

// A row of numbers of about 1, whose scales differ.
std::vector<std::uint8_t> random_row(const DecodeCase& shape, std::size_t bytes, Random& random) {
  std::vector<std::uint8_t> row(bytes);
  if (shape.format == CacheFormat::bf16) {
    put_brain(row, 0, bytes, random);
    return row;
  }
  if (shape.format == CacheFormat::fp8_576) {
    for (std::uint8_t& byte : row) byte = Float8E4M3(static_cast<float>(random.normal())).bits;
    return row;
  }
  const bool wide = shape.format == CacheFormat::fp8_656;
  const std::size_t quantised = wide ? 512 : 448, group = wide ? 128 : 64;
  for (std::size_t first = 0, g = 0; first < quantised; first += group, ++g) {
    const int exponent = -static_cast<int>(random.below(4));
    double scale = std::ldexp(1.0, exponent);
    if (wide) {
      if (shape.odd_scales) scale *= 0.7 + 0.6 * random.uniform();
      put(row, 512 + 4 * g, std::bit_cast<std::uint32_t>(static_cast<float>(scale)), 4);
    } else {
      row[576 + g] = static_cast<std::uint8_t>(127 + exponent);
    }
    for (std::size_t c = first; c < first + group; ++c) {
      row[c] = Float8E4M3(static_cast<float>(random.normal() / scale)).bits;
    }
  }
  put_brain(row, wide ? 528 : 448, wide ? 656 : 576, random);
  return row;
}

// Slots that entries name, of which any may be outside of the cache.
void fill_cache(const DecodeCase& shape, const TensorView& cache,
                const std::vector<std::int64_t>& named, Random& random) {
  const std::int64_t slots = cache.size(0) * cache.size(1), bytes = oracle::row_bytes(cache);
  std::vector<bool> seen(static_cast<std::size_t>(slots), !shape.poison);
  for (const std::int64_t slot : named) {
    if (slot >= 0 && slot < slots) seen[static_cast<std::size_t>(slot)] = true;
  }
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    // All bits set are NaN in every format.
    const std::vector<std::uint8_t> row =
        seen[static_cast<std::size_t>(slot)]
            ? random_row(shape, static_cast<std::size_t>(bytes), random)
            : std::vector<std::uint8_t>(static_cast<std::size_t>(bytes), 0xff);
    for (std::int64_t byte = 0; byte < bytes; ++byte) {
      oracle::cache_byte(cache, shape.format, slot / cache.size(1), slot % cache.size(1), byte) =
          row[static_cast<std::size_t>(byte)];
    }
  }
}

void fill_indices(const DecodeCase& shape, const TensorView& indices, std::int64_t slots,
                  Random& random) {
  constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min(),
                         kHighest = std::numeric_limits<std::int32_t>::max();
  const std::int32_t absent[] = {-1, static_cast<std::int32_t>(slots), kLowest, kHighest};
  if (shape.choice == Choice::distinct) {
    testing::fill_distinct(indices, random, slots);
    return;
  }
  testing::fill_below(indices, random, std::max<std::int64_t>(slots, 1));
  if (shape.choice == Choice::repeated) return;
  for (std::int64_t i = 0; i < shape.b; ++i) {
    for (std::int64_t s = 0; s < shape.s_q; ++s) {
      const bool nothing = shape.choice == Choice::nothing ||
                           (shape.choice == Choice::some_nothing && (i + s) % 2 == 0);
      for (std::int64_t j = 0; j < indices.size(2); ++j) {
        if (nothing || j % 3 == 1) {
          indices.at<std::int32_t>(i, s, j) = absent[static_cast<std::size_t>(random.below(4))];
        }
      }
    }
  }
}

std::int32_t length_of(const DecodeCase& shape, std::int64_t topk, std::int64_t number,
                       Random& random) {
  const std::int32_t beyond[] = {-1, std::numeric_limits<std::int32_t>::min(),
                                 static_cast<std::int32_t>(topk + 1),
                                 std::numeric_limits<std::int32_t>::max()};
  switch (shape.lengths) {
    case Lengths::absent:
      return static_cast<std::int32_t>(topk);
    case Lengths::zero:
      return 0;
    case Lengths::one:
      return 1;
    case Lengths::out_of_range:
      return beyond[number % 4];
    default:
      return static_cast<std::int32_t>(random.below(topk + 1));
  }
}

// [b], or [b, s_q], of 0 to `most` and beyond.
StridedTensor make_lengths(const DecodeCase& shape, std::int64_t most, Random& random) {
  const std::int64_t s_q = shape.length_per_query ? shape.s_q : 1;
  std::vector<std::int64_t> sizes = {shape.b}, room;
  if (shape.length_per_query) sizes.push_back(shape.s_q);
  room = sizes;
  room.back() *= std::max<std::int64_t>(shape.length_stride, 1);
  StridedTensor lengths =
      testing::make_tensor(DType::i32, room, shape.length_per_query ? shape.layout : Layout::dense);
  std::vector<std::int64_t> strides(lengths.view.strides().begin(), lengths.view.strides().end());
  strides.back() = shape.length_stride;
  lengths.view = TensorView(lengths.view.data(), DType::i32, sizes, strides);
  for (std::int64_t i = 0; i < shape.b; ++i) {
    for (std::int64_t s = 0; s < s_q; ++s) {
      const std::int32_t length = length_of(shape, most, i * s_q + s, random);
      if (shape.length_per_query) {
        lengths.view.at<std::int32_t>(i, s) = length;
      } else {
        lengths.view.at<std::int32_t>(i) = length;
      }
    }
  }
  return lengths;
}

// Contexts are as long as the table, unless the case has lengths.
ChosenTensors make_paged(const DecodeCase& shape, const Part& part, Random& random) {
  ChosenTensors paged;
  paged.cache = make_cache(shape.format, part.blocks, part.block_size, shape.columns, shape.layout);
  paged.context_lens = make_lengths(shape, shape.table * part.block_size, random);
  DecodeCase of_tables = shape;  // whose entries are drawn as the indices of one query
  of_tables.s_q = 1;
  Tensor drawn(DType::i32, {shape.b, 1, shape.table});
  fill_indices(of_tables, drawn.view(), part.blocks, random);
  paged.block_tables = testing::make_tensor(DType::i32, {shape.b, shape.table}, shape.layout);
  std::vector<std::int64_t> named;
  for (std::int64_t i = 0; i < shape.b; ++i) {
    std::int64_t context = 0;
    for (std::int64_t s = 0; s < (shape.length_per_query ? shape.s_q : 1); ++s) {
      context = std::max<std::int64_t>(context, shape.length_per_query
                                                    ? paged.context_lens.view.at<std::int32_t>(i, s)
                                                    : paged.context_lens.view.at<std::int32_t>(i));
    }
    for (std::int64_t n = 0; n < shape.table; ++n) {
      const std::int64_t block = drawn.view().at<std::int32_t>(i, 0, n);
      paged.block_tables.view.at<std::int32_t>(i, n) = static_cast<std::int32_t>(block);
      for (std::int64_t r = 0; r < part.block_size && n * part.block_size + r < context; ++r) {
        if (block >= 0 && block < part.blocks) named.push_back(block * part.block_size + r);
      }
    }
  }
  fill_cache(shape, paged.cache.view, named, random);
  return paged;
}

ChosenTensors make_chosen(const DecodeCase& shape, const Part& part, Random& random) {
  ChosenTensors chosen;
  const Layout layout = shape.layout;
  chosen.cache = make_cache(shape.format, part.blocks, part.block_size, shape.columns, layout);
  chosen.indices = testing::make_tensor(DType::i32, {shape.b, shape.s_q, part.topk}, layout);
  fill_indices(shape, chosen.indices.view, part.blocks * part.block_size, random);
  if (layout == Layout::broadcast) {  // the numbers of a sequence are those of all
    fill_indices(shape, chosen.indices.view.slice(0, 0, std::min<std::int64_t>(shape.b, 1)),
                 part.blocks * part.block_size, random);
  }
  if (shape.lengths != Lengths::absent) {
    chosen.topk_length = make_lengths(shape, part.topk, random);
  }
  std::vector<std::int64_t> named;
  for (const double slot : testing::read(chosen.indices.view)) {
    named.push_back(static_cast<std::int64_t>(slot));
  }
  fill_cache(shape, chosen.cache.view, named, random);
  return chosen;
}

void clear_slots(const DecodeCase& shape, const TensorView& cache) {
  for (std::int64_t slot = 0; slot < shape.zero_slots; ++slot) {
    for (std::int64_t byte = 0; byte < oracle::row_bytes(cache); ++byte) {
      oracle::cache_byte(cache, shape.format, slot / cache.size(1), slot % cache.size(1), byte) = 0;
    }
  }
}

float sink_of(const DecodeCase& shape, std::int64_t h, Random& random) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto finite = static_cast<float>(3 * random.normal());
  switch (shape.sink) {
    case Sink::minus_inf:
      return -kInfinity;
    case Sink::plus_inf:
      return kInfinity;
    case Sink::mixed:
      return h % 3 == 0 ? kInfinity : h % 3 == 1 ? -kInfinity : finite;
    default:
      return finite;
  }
}

}  // namespace

std::string describe(const DecodeCase& shape) {
  using testing::numbered;
  return numbered("b ", shape.b) + numbered(", s_q ", shape.s_q) + numbered(", h_q ", shape.h_q) +
         (shape.table < 0 ? numbered(", topk ", shape.topk) : numbered(", table ", shape.table)) +
         (shape.extra_topk < 0 ? "" : numbered(" and ", shape.extra_topk)) +
         numbered(", blocks ", shape.blocks) + numbered(", block_size ", shape.block_size);
}

ChosenTensors ChosenTensors::on(Device device) const {
  return {testing::on(device, cache), testing::on(device, indices),
          testing::on(device, topk_length), testing::on(device, block_tables),
          testing::on(device, context_lens)};
}

DecodeStep::DecodeStep(const DecodeCase& step) : shape(step) {
  Random random(testing::seed_from(shape.name));
  const std::int64_t d_qk = row_columns(shape.format, shape.columns);
  q = testing::make_tensor(DType::bf16, {shape.b, shape.s_q, shape.h_q, d_qk}, shape.layout);
  testing::fill_normal(q.view, random, shape.logits);
  const Part part{shape.blocks, shape.block_size, shape.topk};
  chosen = shape.table >= 0 ? make_paged(shape, part, random) : make_chosen(shape, part, random);
  clear_slots(shape, chosen.cache.view);
  if (shape.extra_topk >= 0) {
    extra =
        make_chosen(shape, {shape.extra_blocks, shape.extra_block_size, shape.extra_topk}, random);
  }
  if (shape.sink != Sink::absent) {
    attn_sink = testing::make_tensor(DType::f32, {shape.h_q}, Layout::dense);
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      attn_sink.view.at<float>(h) = sink_of(shape, h, random);
    }
  }
  const auto scalar = [](double value) {
    if (value == 0) return StridedTensor();
    StridedTensor one = testing::make_tensor(DType::f32, {1}, Layout::dense);
    one.view.at<float>(0) = static_cast<float>(value);
    return one;
  };
  q_scale = scalar(shape.q_scale);
  kv_scale = scalar(shape.kv_scale);
  out = testing::make_output(DType::bf16, {shape.b, shape.s_q, shape.h_q, 512}, shape.layout);
  lse = testing::make_output(DType::f32, {shape.b, shape.s_q, shape.h_q}, shape.layout);
}

DecodeStep DecodeStep::on(Device device) const {
  DecodeStep copy(DecodeCase{.name = shape.name, .b = 0});
  copy.shape = shape;
  copy.q = testing::on(device, q);
  copy.attn_sink = testing::on(device, attn_sink);
  copy.q_scale = testing::on(device, q_scale);
  copy.kv_scale = testing::on(device, kv_scale);
  copy.out = testing::on(device, out);
  copy.lse = testing::on(device, lse);
  copy.chosen = chosen.on(device);
  copy.extra = extra.on(device);
  return copy;
}

DecodeArgs DecodeStep::args() const {
  return {.q = q.view,
          .cache = chosen.cache.view,
          .indices = chosen.indices.view,
          .topk_length = chosen.topk_length.view,
          .block_tables = chosen.block_tables.view,
          .context_lens = chosen.context_lens.view,
          .extra_cache = extra.cache.view,
          .extra_indices = extra.indices.view,
          .extra_topk_length = extra.topk_length.view,
          .attn_sink = attn_sink.view,
          .q_scale = q_scale.view,
          .kv_scale = kv_scale.view,
          .format = shape.format,
          .scale = shape.scale,
          .batch_invariant = shape.batch_invariant,
          .causal = shape.causal,
          .flash_mla_lse = shape.flash_mla_lse,
          .out = out.view,
          .lse = lse.view};
}

}  // namespace winnow::sparse_mla
