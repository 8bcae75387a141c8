// What an operation shows to the tests and to the command line: its case table and its benchmarks.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"

namespace winnow::testing {

// Where a case or a benchmark runs.
struct Target {
  DeviceType device = DeviceType::cpu;
  RunOptions options;  // may force a backend
  Stream stream{};     // of a GPU: where a benchmark queues its work
};

// One tensor (or property) of one case against the oracle.
struct Comparison {
  std::string what;  // "lse", "dkv", "row sums"
  double error = 0;  // in the units of the tolerance
  double tolerance = 0;
  bool passed = false;
  std::string detail;  // the worst element, or what else went wrong; may be empty
  // Of a tensor: where that element was when it was compared; it may be gone.
  const void* element = nullptr;
};

// Some elements of an output, for a comparison with those of another machine (testing/sample.h).
struct Sample {
  std::string what;  // "lse"
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // of the whole output
  std::vector<double> values;
  std::vector<double> tolerances;  // how far each may be from what another machine gives
};

struct CaseOutcome {
  Backend backend = Backend::cpu;  // the one that ran
  std::vector<Comparison> comparisons;
  std::vector<Sample> samples{};  // of the outputs that were looked at as a whole
  bool passed() const {
    for (const Comparison& comparison : comparisons) {
      if (!comparison.passed) return false;
    }
    return !comparisons.empty();
  }
};

// A row of the case table. Names are unique within the operation and need no quoting in a shell.
struct Case {
  std::string name;   // "bf16-h64-k512-causal"
  std::string shape;  // "s_q 8, h_q 64, s_kv 300, d_qk 576, topk 512"
  std::function<CaseOutcome(const Target&)> run;
  bool on_gpu = false;  // GPU backends take it; every case runs on the CPU
  int ranks = 0;        // a launched world of as many processes runs it too; 0: one process alone
  std::optional<Backend> only_gpu{};  // of the GPU backends this one alone takes it
  std::optional<Backend> not_on{};    // this one does not take it
};

// What a benchmark is compared with, measured in the same run with the same threads.
struct Ceiling {
  enum class Kind { none, matmul, copy } kind = Kind::none;
  std::int64_t m = 0, n = 0, k = 0;  // matmul: c[m, n] = a[m, k] * b[k, n]; f32, bf16 on a GPU
                                     // (with mma.sync where the backend is cuda)
  std::int64_t bytes = 0;  // copy: bytes that are read once and written once; on a GPU, whose
                           // bandwidth is that of both, half of them are read and half written
  int threads = 0;         // of the operation; 0: num_threads()
};

// What a benchmark times.
struct Prepared {
  std::function<void()> run;      // owns what it needs
  std::int64_t memory_bytes = 0;  // of the outputs and the workspace of a call; 0: not counted

  Prepared(std::function<void()> timed, std::initializer_list<ConstTensorView> memory = {})
      : run(std::move(timed)) {
    for (const ConstTensorView& view : memory) memory_bytes += view.numel() * size_of(view.dtype());
  }
};

struct Benchmark {
  std::string name;   // "f32-h64-k512"
  std::string shape;  // as in Case
  double flops = 0;   // useful FLOPs of one run; 0 where bytes are what counts
  double bytes = 0;   // useful bytes of one run
  Ceiling ceiling;
  DeviceType device = DeviceType::cpu;
  // What the project promises; on a GPU for the H200 (tools/winnow/target.h has those of others).
  std::optional<double> target;          // least ratio of the ceiling, 0 to 1
  std::optional<double> target_seconds;  // most that one run may take
  bool cold = false;                     // on a GPU: nothing is in the L2 cache when a run begins
  bool queued = false;                   // on a GPU: runs are queued behind each other, not awaited
  bool in_graph = false;        // on a GPU: several runs are a CUDA graph, without the host
  bool beside_product = false;  // on a GPU: timed alone and while products run beside it
  bool slow = false;            // left out unless asked for by name or with --all
  // Allocates the tensors of a call. On a GPU what it returns queues its work on the default
  // stream, or if it runs in a graph or beside products on the target's.
  std::function<Prepared(const Target&)> prepare;
};

// The arguments of a recorded call by their names.
class NamedArguments {
 public:
  virtual ~NamedArguments() = default;
  virtual TensorView tensor(std::string_view name) const = 0;  // may be absent
  virtual bool has(std::string_view name) const = 0;           // of numbers, flags and choices
  virtual double number(std::string_view name) const = 0;
  virtual std::int64_t integer(std::string_view name) const = 0;
};

struct Operation {
  std::string name;     // "sparse_mla::forward"
  std::string summary;  // one line for listings
  std::vector<Case> cases;
  std::vector<Benchmark> benchmarks;
  // Prepares a call (repeated.h); empty if the operation is not a single function.
  std::function<std::function<Backend()>(const NamedArguments&, const RunOptions&)> repeat{};
};

// Every operation of the library, in the order of the support table.
const std::vector<Operation>& operations();

}  // namespace winnow::testing
