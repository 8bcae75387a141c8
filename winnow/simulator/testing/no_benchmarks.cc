// Case tables name the benchmarks of their operations; programs that simulate have none.
#include <vector>

#include "winnow/testing/operation.h"

namespace winnow::sparse_mla {
std::vector<testing::Benchmark> backward_benchmarks() { return {}; }
std::vector<testing::Benchmark> decode_benchmarks() { return {}; }
std::vector<testing::Benchmark> distribution_benchmarks() { return {}; }
std::vector<testing::Benchmark> forward_benchmarks() { return {}; }
std::vector<testing::Benchmark> store_benchmarks() { return {}; }
}  // namespace winnow::sparse_mla

namespace winnow::compressor {
std::vector<testing::Benchmark> backward_benchmarks() { return {}; }
std::vector<testing::Benchmark> forward_benchmarks() { return {}; }
std::vector<testing::Benchmark> step_benchmarks() { return {}; }
}  // namespace winnow::compressor

namespace winnow::indexer {
std::vector<testing::Benchmark> backward_benchmarks() { return {}; }
std::vector<testing::Benchmark> quantize_benchmarks() { return {}; }
std::vector<testing::Benchmark> scores_benchmarks() { return {}; }
std::vector<testing::Benchmark> scores_paged_benchmarks() { return {}; }
std::vector<testing::Benchmark> topk_benchmarks() { return {}; }
std::vector<testing::Benchmark> topk_paged_benchmarks() { return {}; }
}  // namespace winnow::indexer

namespace winnow::paged_xl {
std::vector<testing::Benchmark> append_benchmarks() { return {}; }
std::vector<testing::Benchmark> attention_benchmarks() { return {}; }
std::vector<testing::Benchmark> position_term_benchmarks() { return {}; }
}  // namespace winnow::paged_xl
namespace winnow::expert_parallel {
std::vector<testing::Benchmark> all_to_all_benchmarks() { return {}; }
std::vector<testing::Benchmark> layout_benchmarks() { return {}; }
std::vector<testing::Benchmark> low_latency_benchmarks() { return {}; }
std::vector<testing::Benchmark> notify_benchmarks() { return {}; }
}  // namespace winnow::expert_parallel
