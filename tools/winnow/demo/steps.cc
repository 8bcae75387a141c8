#include "tools/winnow/demo/steps.h"

namespace winnow::demo {

const std::vector<Step>& steps() {
  static const std::vector<Step> list = {
      {"document", run_document_step},          // bytes are tokens
      {"embedding", run_embedding_step},        // tokens become queries and latent rows
      {"dense", run_dense_step},                // what full attention looks at
      {"indexer", run_indexer_step},            // an untrained indexer picks the top-k
      {"forward", run_forward_step},            // attention over what it picked
      {"distribution", run_distribution_step},  // what the heads made of it: the teacher
      {"training", run_training_step},          // the indexer learns from the teacher
      {"learned", run_learned_step},            // attention over what it picks now
      {"backward", run_backward_step},          // gradients against finite differences
      {"decode", run_decode_step},              // the last tokens again, over a paged cache
      {"experts", run_experts_step},            // a mixture of experts over several ranks
      {"pictures", run_pictures_step},
  };
  return list;
}

}  // namespace winnow::demo
