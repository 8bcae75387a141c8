// `winnow bench`: the operations beside a ceiling that is measured in the same run. Google
// Benchmark does the timing; the two sides of a pair are repeated in random order. Under a
// launcher each process with a GPU is a rank of the benchmarks; rank 0 speaks for all.
#include <algorithm>
#include <cstring>
#include <ctime>
#include <iostream>
#include <memory>
#include <string>

#include "tools/winnow/commands.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/gpu_timer.h"
#include "tools/winnow/progress.h"
#include "tools/winnow/table.h"
#include "tools/winnow/target.h"
#include <benchmark/benchmark.h>
#include <nlohmann/json.hpp>

#include "winnow/core/device.h"
#include "winnow/core/error.h"
#include "winnow/core/executor.h"
#include "winnow/core/nearest.h"
#include "winnow/core/parallel.h"
#include "winnow/core/route.h"
#include "winnow/core/tensor.h"
#include "winnow/core/version.h"
#include "winnow/cpu/kernels.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/table.h"

namespace winnow::cli {
namespace {

using demo::format_text;
using nlohmann::ordered_json;
using Runnable = std::function<void()>;

// Keeps the seconds of every repetition and prints nothing.
class Collector : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      const double seconds = run.real_accumulated_time / static_cast<double>(run.iterations);
      (run.benchmark_name().starts_with("ceiling") ? ceiling : operation).push_back(seconds);
    }
  }
  std::vector<double> operation, ceiling;
};

Measured measure(const Runnable& operation, const Runnable& ceiling, const BenchOptions& options) {
  const auto add = [&](const char* name, const Runnable& run) {
    benchmark::RegisterBenchmark(name,
                                 [&run](benchmark::State& state) {
                                   for (auto _ : state) run();
                                 })
        ->UseRealTime()
        ->MinTime(options.seconds)
        ->Repetitions(options.repetitions);
  };
  operation();  // warms caches, pages and the thread team
  add("operation", operation);
  if (ceiling) {
    ceiling();
    add("ceiling", ceiling);
  }
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector, "all");
  benchmark::ClearRegisteredBenchmarks();
  return {median(collector.operation), median(collector.ceiling)};
}

Runnable matmul_ceiling(const testing::Ceiling& ceiling) {
  struct Matrices {
    Tensor a, b, c;
  };
  auto matrices = std::make_shared<Matrices>(Matrices{Tensor(DType::f32, {ceiling.m, ceiling.k}),
                                                      Tensor(DType::f32, {ceiling.k, ceiling.n}),
                                                      Tensor(DType::f32, {ceiling.m, ceiling.n})});
  testing::Random random(1);
  testing::fill_normal(matrices->a, random);
  testing::fill_normal(matrices->b, random);
  return [matrices, ceiling] {
    cpu_kernels().matmul(static_cast<const float*>(matrices->a.data()),
                         static_cast<const float*>(matrices->b.data()),
                         static_cast<float*>(matrices->c.data()), ceiling.m, ceiling.n, ceiling.k,
                         ThreadExecutor());
  };
}

// The threads of a ceiling, as long as it runs.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(num_threads()) {
    if (threads > 0 && threads != before_) set_num_threads(threads);
  }
  ~ThreadCount() {
    if (num_threads() != before_) set_num_threads(before_);
  }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

Runnable copy_ceiling(const testing::Ceiling& ceiling) {
  struct Buffers {
    Tensor from, to;
  };
  auto buffers = std::make_shared<Buffers>(
      Buffers{Tensor(DType::u8, {ceiling.bytes}), Tensor(DType::u8, {ceiling.bytes})});
  return [buffers, bytes = ceiling.bytes, threads = ceiling.threads] {
    constexpr std::int64_t kGrain = 1 << 20;
    const ThreadCount count(threads);
    ThreadExecutor().for_each_range(bytes, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      std::memcpy(static_cast<char*>(buffers->to.data()) + begin,
                  static_cast<const char*>(buffers->from.data()) + begin,
                  static_cast<std::size_t>(end - begin));
    });
  };
}

Runnable prepare_ceiling(const testing::Ceiling& ceiling) {
  switch (ceiling.kind) {
    case testing::Ceiling::Kind::matmul:
      return matmul_ceiling(ceiling);
    case testing::Ceiling::Kind::copy:
      return copy_ceiling(ceiling);
    case testing::Ceiling::Kind::none:
      break;
  }
  return nullptr;
}

// The backend of operations that all of them implement.
Backend backend_of(const testing::Target& target) {
  constexpr Backend kAll[] = {Backend::sm100, Backend::sm90, Backend::cuda, Backend::cpu};
  return choose_backend("bench", testing::device_of(target), target.options, kAll);
}

ordered_json run_one(const testing::Operation& operation, const testing::Benchmark& one,
                     testing::Target target, Backend backend, const BenchOptions& options) {
  const bool gpu = one.device == DeviceType::cuda;
  if (gpu) target.stream = timed_stream(one);
  const testing::Prepared prepared = one.prepare(target);
  const Runnable ceiling = gpu ? nullptr : prepare_ceiling(one.ceiling);
  const Measured measured = gpu ? measure_on_gpu(prepared.run, one, backend, options)
                                : measure(prepared.run, ceiling, options);
  ordered_json result = {{"operation", operation.name},
                         {"benchmark", one.name},
                         {"shape", one.shape},
                         {"seconds", measured.operation}};
  if (backend == Backend::cuda) result["backend"] = to_string(backend);
  if (prepared.memory_bytes > 0) result["memory_bytes"] = prepared.memory_bytes;
  if (one.flops > 0) result["gflops_per_second"] = one.flops / measured.operation * 1e-9;
  if (one.bytes > 0) result["gigabytes_per_second"] = one.bytes / measured.operation * 1e-9;
  if (measured.ceiling > 0) {
    const testing::Ceiling& c = one.ceiling;
    const bool matmul = c.kind == testing::Ceiling::Kind::matmul;
    const double work = matmul ? 2.0 * double(c.m) * double(c.n) * double(c.k) : double(c.bytes);
    const double rate = (matmul ? one.flops : one.bytes) / measured.operation;
    result["ceiling"] = !matmul ? "copy" : backend == Backend::cuda ? "mma.sync product" : "matmul";
    result["ceiling_seconds"] = measured.ceiling;
    result[matmul ? "ceiling_gflops_per_second" : "ceiling_gigabytes_per_second"] =
        work / measured.ceiling * 1e-9;
    result["ratio"] = rate / (work / measured.ceiling);
  }
  if (measured.product > 0) {
    result["beside_product_seconds"] = measured.beside;
    result["product_seconds"] = measured.product;
    result["product_beside_seconds"] = measured.product_beside;
  }
  judge(operation, one, gpu ? gpus().gpus.front().name : "", backend, result);
  return result;
}

// `prefix` is empty or "ceiling_".
std::string rate_text(const ordered_json& result, const std::string& prefix) {
  if (const double rate = result.value(prefix + "gflops_per_second", 0.0); rate > 0) {
    return rate < 1e4 ? format_text("%.1f GFLOP/s", rate)
                      : format_text("%.1f TFLOP/s", rate * 1e-3);
  }
  return format_text("%.1f GB/s", result.value(prefix + "gigabytes_per_second", 0.0));
}

std::string memory_text(const ordered_json& result) {
  if (!result.contains("memory_bytes")) return "";
  return format_text("%.2f MiB", result["memory_bytes"].get<double>() / (1 << 20));
}

// What the operation and a product lose when they run at the same time.
std::string beside_text(const ordered_json& result) {
  if (!result.contains("product_seconds")) return "";
  const auto lost = [&](const char* alone, const char* beside) {
    return 100 * (result[beside].get<double>() / result[alone].get<double>() - 1);
  };
  return format_text("%.4f ms", result["beside_product_seconds"].get<double>() * 1e3) +
         format_text(", %+.0f %%", lost("seconds", "beside_product_seconds")) +
         format_text("; product %+.0f %%", lost("product_seconds", "product_beside_seconds"));
}

std::vector<std::string> row_of(const ordered_json& result) {
  const double seconds = result["seconds"];
  const bool ceiling = result.contains("ceiling");
  return {result["operation"],
          result["benchmark"],
          format_text("%.4f ms", seconds * 1e3),
          rate_text(result, ""),
          ceiling ? rate_text(result, "ceiling_") + " " + result["ceiling"].get<std::string>() : "",
          ceiling ? format_text("%.0f %%", 100 * result["ratio"].get<double>()) : "",
          verdict(result)};
}

Table table_of(const ordered_json& results) {
  std::vector<Table::Column> columns = {{"operation"},
                                        {"benchmark"},
                                        {"time", Table::Align::right},
                                        {"rate", Table::Align::right},
                                        {"ceiling", Table::Align::right},
                                        {"of ceiling", Table::Align::right},
                                        {"target"}};
  // Beside the time, where some operation has them.
  constexpr std::ptrdiff_t kBehindTime = 3;
  const auto some_has = [&](const char* field) {
    return std::any_of(results.begin(), results.end(),
                       [&](const ordered_json& result) { return result.contains(field); });
  };
  const bool memory = some_has("memory_bytes"), beside = some_has("product_seconds");
  const auto insert = [](auto& to, auto what) { to.insert(to.begin() + kBehindTime, what); };
  if (beside) insert(columns, Table::Column{"beside a product", Table::Align::right});
  if (memory) insert(columns, Table::Column{"memory", Table::Align::right});
  Table table(std::move(columns));
  for (const ordered_json& result : results) {
    std::vector<std::string> row = row_of(result);
    if (beside) insert(row, beside_text(result));
    if (memory) insert(row, memory_text(result));
    table.add(std::move(row));
  }
  return table;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

int run_bench(const BenchOptions& options) {
  const auto operations = select_operations("bench", options.operation);
  const testing::Target target = make_target("bench", options.where);
  const Backend backend = backend_of(target);
  // The library's own arguments; ours were parsed before.
  std::string arguments[] = {"winnow", "--benchmark_enable_random_interleaving=true"};
  char* argv[] = {arguments[0].data(), arguments[1].data(), nullptr};
  int argc = 2;
  benchmark::Initialize(&argc, argv);

  ordered_json results = ordered_json::array();
  Progress progress(std::cerr, progress_wanted());
  std::vector<std::string> known;
  bool found = false, missed = false;
  for (const auto* operation : operations) {
    for (const testing::Benchmark& one : operation->benchmarks) {
      if (one.device == target.device) known.push_back(one.name);
      const bool named = one.name == options.only_benchmark;
      if (!options.only_benchmark.empty() && !named) continue;
      if (one.slow && !named && !options.all) continue;
      if (one.device != target.device) continue;
      found = true;
      progress.show(operation->name + " " + one.name);
      results.push_back(run_one(*operation, one, target, backend, options));
      missed = missed || !results.back().value("reached", true);
    }
  }
  progress.clear();
  const auto launch = expert_parallel::launch_environment();
  if (launch && launch->rank != 0) return kOk;  // rank 0 speaks for all
  if (!found && !options.only_benchmark.empty()) {
    throw Error(ErrorCode::invalid_argument, "bench", "--name", "a benchmark of the operation",
                "\"" + options.only_benchmark + "\"" + suggestion(options.only_benchmark, known));
  }
  const std::string where = target.device == DeviceType::cuda
                                ? gpus().gpus.front().name
                                : std::to_string(num_threads()) + " threads, " + cpu_kernels().name;
  const ordered_json report = {{"version", WINNOW_VERSION},
                               {"date", today()},
                               {"where", where},
                               {"threads", num_threads()},
                               {"cpu_module", cpu_kernels().name},
                               {"repetitions", options.repetitions},
                               {"results", results}};
  if (options.json) {
    std::cout << report.dump(2) << "\n";
  } else {
    std::cout << "winnow " << WINNOW_VERSION << ", " << today() << ", " << where << "; median of "
              << options.repetitions << " repetitions\n\n";
    table_of(results).print(std::cout);
  }
  return options.check && missed ? kCheckFailed : kOk;
}

}  // namespace winnow::cli
