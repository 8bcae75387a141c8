// The benchmarks of sparse_mla::store, which count the bytes that are read and written.
#include <memory>

#include "winnow/cache/cache_cases.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"
#include "winnow/testing/table.h"

namespace winnow::sparse_mla {

std::vector<testing::Benchmark> store_benchmarks();

namespace {

testing::Benchmark make_benchmark(CacheFormat format, std::int64_t n, DeviceType device) {
  constexpr std::int64_t kBlockSize = 64, kGpuCopy = std::int64_t{4} << 30;
  const std::int64_t columns = row_columns(format);
  const std::int64_t written = row_elements(format) * (format == CacheFormat::bf16 ? 2 : 1);
  testing::Benchmark benchmark;
  benchmark.name =
      name_of(format) + testing::numbered("-n", n) + (device == DeviceType::cuda ? "-gpu" : "");
  benchmark.shape = testing::numbered("n ", n) + testing::numbered(", columns ", columns);
  benchmark.bytes = double(n) * double(2 * columns + written);
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes =
      device == DeviceType::cpu ? static_cast<std::int64_t>(benchmark.bytes / 2) : kGpuCopy;
  benchmark.device = device;
  if (device == DeviceType::cuda) benchmark.queued = true;
  // Only these fill the GPU.
  if (device == DeviceType::cuda && n >= 262144) benchmark.target = 0.5;
  benchmark.prepare = [=](const testing::Target& target) -> std::function<void()> {
    const Device where = testing::device_of(target);
    struct Data {
      Tensor rows, slots, workspace;
      testing::StridedTensor cache;
    };
    auto data = std::make_shared<Data>();
    data->rows = Tensor(DType::bf16, {n, columns});
    testing::Random random(1);
    testing::fill_normal_rows(data->rows, random);
    data->rows = data->rows.to(where);
    data->slots = Tensor(DType::i64, {n});
    for (std::int64_t i = 0; i < n; ++i) data->slots.view().at<std::int64_t>(i) = i;
    data->slots = data->slots.to(where);
    data->cache = testing::on(where, make_cache(format, n / kBlockSize, kBlockSize));
    StoreArgs args{
        .rows = data->rows, .slots = data->slots, .format = format, .cache = data->cache.view};
    data->workspace = Tensor(DType::u8, {store_workspace_bytes(args, target.options)}, where);
    args.workspace = data->workspace;
    return [data, args, options = target.options] { store(args, options); };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> store_benchmarks() {
  std::vector<testing::Benchmark> list;
  for (const CacheFormat format : {CacheFormat::fp8_656, CacheFormat::fp8_584, CacheFormat::bf16}) {
    list.push_back(make_benchmark(format, 16384, DeviceType::cpu));
    for (const std::int64_t n : {128, 16384, 262144}) {
      list.push_back(make_benchmark(format, n, DeviceType::cuda));
    }
  }
  return list;
}

}  // namespace winnow::sparse_mla
