// The list of operations. Each room gives its own entry.
#include "winnow/testing/operation.h"

namespace winnow::sparse_mla {
testing::Operation forward_operation();
testing::Operation distribution_operation();
testing::Operation backward_operation();
testing::Operation decode_operation();
testing::Operation store_operation();
}  // namespace winnow::sparse_mla

namespace winnow::indexer {
testing::Operation topk_operation();
testing::Operation topk_paged_operation();
testing::Operation scores_operation();
testing::Operation backward_operation();
testing::Operation quantize_operation();
}  // namespace winnow::indexer

namespace winnow::paged_xl {
testing::Operation attention_operation();
testing::Operation append_operation();
testing::Operation position_term_operation();
}  // namespace winnow::paged_xl

namespace winnow::expert_parallel {
testing::Operation layout_operation();
testing::Operation notify_operation();
testing::Operation low_latency_operation();
testing::Operation all_to_all_operation();
}  // namespace winnow::expert_parallel

namespace winnow::testing {

const std::vector<Operation>& operations() {
  static const std::vector<Operation> list = {
      indexer::topk_operation(),
      indexer::topk_paged_operation(),
      indexer::scores_operation(),
      indexer::backward_operation(),
      indexer::quantize_operation(),
      sparse_mla::forward_operation(),
      sparse_mla::distribution_operation(),
      sparse_mla::backward_operation(),
      sparse_mla::decode_operation(),
      sparse_mla::store_operation(),
      paged_xl::attention_operation(),
      paged_xl::append_operation(),
      paged_xl::position_term_operation(),
      expert_parallel::layout_operation(),
      expert_parallel::notify_operation(),
      expert_parallel::all_to_all_operation(),
      expert_parallel::low_latency_operation(),
  };
  return list;
}

}  // namespace winnow::testing
