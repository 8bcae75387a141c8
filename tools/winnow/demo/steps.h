// The steps of the demo, in order. A new one is a file step_<name>.cc and a line in steps.cc.
#pragma once

#include <string_view>
#include <vector>

#include "tools/winnow/demo/state.h"

namespace winnow::demo {

struct Step {
  std::string_view name;
  void (*run)(DemoState& state, StepReport& report);
};

const std::vector<Step>& steps();

void run_document_step(DemoState& state, StepReport& report);
void run_embedding_step(DemoState& state, StepReport& report);
void run_dense_step(DemoState& state, StepReport& report);
void run_indexer_step(DemoState& state, StepReport& report);
void run_forward_step(DemoState& state, StepReport& report);
void run_distribution_step(DemoState& state, StepReport& report);
void run_training_step(DemoState& state, StepReport& report);
void run_learned_step(DemoState& state, StepReport& report);
void run_backward_step(DemoState& state, StepReport& report);
void run_decode_step(DemoState& state, StepReport& report);
void run_experts_step(DemoState& state, StepReport& report);
void run_pictures_step(DemoState& state, StepReport& report);

}  // namespace winnow::demo
