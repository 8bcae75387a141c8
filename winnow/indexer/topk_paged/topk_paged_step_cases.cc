#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "winnow/indexer/topk_paged/topk_paged_cases.h"

namespace winnow::indexer {

namespace {

std::int64_t sequences(const PagedCase& shape) {
  const auto count = static_cast<std::int64_t>(shape.context_lens.size());
  return shape.of_queries ? count / shape.s_q : count;
}

}  // namespace

std::string describe(const PagedCase& shape) {
  using testing::numbered;
  const std::int32_t longest =
      shape.context_lens.empty() ? 0 : std::ranges::max(shape.context_lens);
  return numbered("b ", sequences(shape)) + numbered(", s_q ", shape.s_q) +
         numbered(", h ", shape.h) + numbered(", d ", shape.d) +
         numbered(", contexts up to ", longest) + numbered(", topk ", shape.topk);
}

std::int64_t PagedStep::b() const { return sequences(shape); }

PagedStep::PagedStep(const PagedCase& step) : shape(step) {
  testing::Random random(testing::seed_from(shape.name));
  q = testing::make_tensor(DType::f8_e4m3, {b(), shape.s_q, shape.h, shape.d}, shape.layout);
  weights = testing::make_tensor(shape.weights_dtype, {b(), shape.s_q, shape.h}, shape.layout);
  testing::fill_normal(q.view, random);
  testing::fill_normal(weights.view, random);
  if (shape.plateau) {
    testing::fill_uniform(q.view, random, 0.1, 1);
    // A head without weight, whose products are positive where those of the others are not.
    testing::fill_uniform(q.view.slice(2, 1, 2), random, -1, -0.1);
    testing::fill(weights.view.slice(2, 1, 2), 0);
  }
  pages = testing::make_output(DType::u8, {shape.num_pages, page_bytes(shape.d)}, shape.layout);
  block_tables = testing::make_output(DType::i32, {b(), shape.table}, shape.layout);
  const Layout lens_layout = shape.of_queries ? shape.layout : Layout::dense;
  std::vector<std::int64_t> dims = {b()};
  if (shape.of_queries) dims.push_back(shape.s_q);
  context_lens = testing::make_tensor(DType::i32, dims, lens_layout);
  std::vector<std::int32_t> order(static_cast<std::size_t>(shape.num_pages));
  std::iota(order.begin(), order.end(), 0);
  testing::shuffle(std::span(order), random);
  std::size_t next = 0;
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < b(); ++i) {
    if (!shape.of_queries) {
      context_lens.view.at<std::int32_t>(i) = shape.context_lens[static_cast<std::size_t>(i)];
    }
    std::int64_t rows = 0;  // that some query sees
    for (std::int64_t j = 0; j < shape.s_q; ++j) {
      if (shape.of_queries) {
        context_lens.view.at<std::int32_t>(i, j) =
            shape.context_lens[static_cast<std::size_t>(i * shape.s_q + j)];
      }
      rows = std::max(rows, visible(i, j));
    }
    for (std::int64_t place = 0; place < shape.table; ++place) {
      const std::int32_t nowhere[] = {-1, static_cast<std::int32_t>(shape.num_pages),
                                      std::numeric_limits<std::int32_t>::min(),
                                      std::numeric_limits<std::int32_t>::max()};
      std::int32_t& entry = block_tables.view.at<std::int32_t>(i, place);
      const bool used = place * kPageRows < rows;
      if (!used || order.empty() || (shape.absent && place % 3 == 1)) {
        entry = nowhere[random.below(4)];
        continue;
      }
      entry = order[next++ % order.size()];  // once all are taken, sequences share pages
      for (std::int64_t r = place * kPageRows; r < std::min(rows, (place + 1) * kPageRows); ++r) {
        slots.push_back(entry * kPageRows + r % kPageRows);
      }
    }
  }
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  const auto count = static_cast<std::int64_t>(slots.size());
  // Large caches repeat their keys, which take long to draw, under other scales.
  const std::int64_t drawn = std::min<std::int64_t>(count, 1 << 16);
  Tensor keys(DType::f8_e4m3, {drawn, shape.d}), scales(DType::f32, {count});
  testing::fill_normal(keys, random);
  testing::fill_normal(scales, random);
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t page = slots[static_cast<std::size_t>(r)] / kPageRows;
    const std::int64_t place = slots[static_cast<std::size_t>(r)] % kPageRows;
    float scale = 0.5f + std::abs(scales.view().at<float>(r));
    const TensorView row = keys.view().slice(0, r % drawn, r % drawn + 1);
    if (shape.equal) testing::fill(row, 0.5), scale = 0.5f;
    if (shape.plateau) {
      const double sign = r % 4 == 3 ? 1 : r % 16 == 5 ? 0 : -1;
      testing::fill_uniform(row, random, 0.2 * sign, sign);
    }
    if (shape.nan && r % 5 == 0) testing::fill(row, std::numeric_limits<double>::quiet_NaN());
    auto* const bytes = &pages.view.at<std::uint8_t>(page, 0);
    std::memcpy(bytes + place * shape.d, row.data(), static_cast<std::size_t>(shape.d));
    std::memcpy(bytes + kPageRows * shape.d + place * std::int64_t{sizeof scale}, &scale,
                sizeof scale);
  }
}

PagedStep PagedStep::on(Device device) const {
  PagedStep copy(PagedCase{.name = shape.name, .num_pages = 0});
  copy.shape = shape;
  copy.q = testing::on(device, q);
  copy.pages = testing::on(device, pages);
  copy.weights = testing::on(device, weights);
  copy.block_tables = testing::on(device, block_tables);
  copy.context_lens = testing::on(device, context_lens);
  return copy;
}

TopkPagedArgs PagedStep::args() const {
  TopkPagedArgs args{.ties = shape.ties, .positions = shape.positions};
  pass_to(args);
  return args;
}

std::int64_t PagedStep::page(std::int64_t i, std::int64_t position) const {
  const std::int64_t page = block_tables.view.at<std::int32_t>(i, position / kPageRows);
  return page >= 0 && page < shape.num_pages ? page : -1;
}

std::int64_t PagedStep::visible(std::int64_t i, std::int64_t j) const {
  const std::int64_t place = shape.of_queries ? i * shape.s_q + j : i;
  const std::int64_t length = shape.context_lens[static_cast<std::size_t>(place)];
  const std::int64_t rows = std::min(std::max<std::int64_t>(length, 0), shape.table * kPageRows);
  if (shape.of_queries) return rows;
  return std::max<std::int64_t>(rows - shape.s_q + 1 + j, 0);
}

PagedStep::Keys PagedStep::keys(std::int64_t i, std::int64_t j) const {
  const std::int64_t rows = visible(i, j), d = shape.d;
  Keys keys{.rows = {},
            .k = testing::make_tensor(DType::f8_e4m3, {rows, d}, Layout::dense),
            .k_scale = testing::make_tensor(DType::f32, {rows}, Layout::dense)};
  testing::fill(keys.k.view, 0);
  testing::fill(keys.k_scale.view, 0);
  for (std::int64_t t = 0; t < rows; ++t) {
    if (page(i, t) < 0) continue;
    keys.rows.push_back(t);
    const std::int64_t place = t % kPageRows;
    const auto* bytes = &pages.view.at<std::uint8_t>(page(i, t), 0);
    std::memcpy(&keys.k.view.at<Float8E4M3>(t, 0), bytes + place * d, static_cast<std::size_t>(d));
    std::memcpy(&keys.k_scale.view.at<float>(t), bytes + kPageRows * d + 4 * place, 4);
  }
  return keys;
}

PagedStep::Wanted PagedStep::wanted(std::int64_t i, std::int64_t j) const {
  const Keys of_query = keys(i, j);
  // The views of one query, whose strides of the other dimensions do not matter.
  const oracle::Inputs in{
      .q = ConstTensorView(&q.view.at<Float8E4M3>(i, j, 0, 0), DType::f8_e4m3,
                           {1, shape.h, shape.d}, {0, q.view.stride(2), 1}),
      .k = of_query.k.view,
      .weights = ConstTensorView(weights.view.slice(0, i, i + 1).slice(1, j, j + 1).data(),
                                 shape.weights_dtype, {1, shape.h}),
      .k_scale = of_query.k_scale.view};
  return {of_query.rows, oracle::scores(in, 0, of_query.rows)};
}

std::pair<PagedCase, testing::Benchmark> make_paged_benchmark(std::int64_t b, std::int64_t s_q,
                                                              std::int32_t rows, std::int64_t h,
                                                              DeviceType device) {
  PagedCase shape{.name = testing::numbered("b", b) + testing::numbered("-sq", s_q) +
                          testing::numbered("-h", h) + testing::numbered("-sk", rows),
                  .s_q = s_q,
                  .h = h,
                  .table = rows / kPageRows,
                  .num_pages = b * rows / kPageRows};
  shape.context_lens.assign(static_cast<std::size_t>(b), rows);
  testing::Benchmark benchmark;
  benchmark.name = shape.name;
  const bool by_flops = device == DeviceType::cpu || s_q >= 4;
  if (by_flops) benchmark.flops = 2.0 * double(b * s_q * h) * double(rows) * double(shape.d);
  if (device == DeviceType::cpu) {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, b * s_q * h, rows, shape.d, 0};
  } else if (by_flops) {
    benchmark.ceiling = {testing::Ceiling::Kind::matmul, 8192, 8192, 8192, 0};
  } else {
    benchmark.bytes = double(b) * double(rows) * double(shape.d + 4);
    benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
    benchmark.ceiling.bytes = std::int64_t{4} << 30;
  }
  benchmark.device = device;
  return {shape, benchmark};
}

}  // namespace winnow::indexer
