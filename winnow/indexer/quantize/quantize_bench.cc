// The benchmarks of indexer::quantize: useful bytes are those of x, the rows and the scales.
#include <memory>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/quantize/quantize.h"

namespace winnow::indexer {

std::vector<testing::Benchmark> quantize_benchmarks();

namespace {

testing::Benchmark make_benchmark(DType dtype, std::int64_t n, bool paged, DeviceType device) {
  constexpr std::int64_t kColumns = 128, kGpuCopy = std::int64_t{4} << 30;
  testing::Benchmark benchmark;
  benchmark.name =
      std::string(to_string(dtype)) + testing::numbered("-n", n) + (paged ? "-pages" : "");
  benchmark.shape = testing::numbered("n ", n) + ", d 128";
  benchmark.bytes = double(n) * double(kColumns * (size_of(dtype) + 1) + 4);
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes =
      device == DeviceType::cpu ? static_cast<std::int64_t>(benchmark.bytes / 2) : kGpuCopy;
  benchmark.device = device;
  benchmark.prepare = [=](const testing::Target& target) -> testing::Prepared {
    const Device where = testing::device_of(target);
    struct Data {
      Tensor x, rows, scale, pages, slots;
    };
    auto data = std::make_shared<Data>();
    data->x = Tensor(dtype, {n, kColumns});
    testing::Random random(1);
    testing::fill_normal_rows(data->x, random);
    data->x = data->x.to(where);
    QuantizeArgs args{.x = data->x};
    if (paged) {
      data->pages = Tensor(DType::u8, {n / kPageRows, page_bytes(kColumns)}, where);
      data->slots = Tensor(DType::i64, {n});
      for (std::int64_t i = 0; i < n; ++i) data->slots.view().at<std::int64_t>(i) = i;
      data->slots = data->slots.to(where);
      args.pages = data->pages;
      args.slots = data->slots;
    } else {
      data->rows = Tensor(DType::f8_e4m3, {n, kColumns}, where);
      data->scale = Tensor(DType::f32, {n}, where);
      args.rows = data->rows;
      args.scale = data->scale;
    }
    return {[data, args, options = target.options] { quantize(args, options); },
            {data->rows, data->scale, data->pages}};
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> quantize_benchmarks() {
  return {make_benchmark(DType::f32, 65536, false, DeviceType::cpu),
          make_benchmark(DType::bf16, 65536, true, DeviceType::cpu),
          make_benchmark(DType::bf16, 1 << 20, false, DeviceType::cuda),
          make_benchmark(DType::bf16, 1 << 20, true, DeviceType::cuda)};
}

}  // namespace winnow::indexer
