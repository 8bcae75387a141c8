// What the steps of the demo hand on to one another.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/winnow/demo/demo.h"
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/layer.h"
#include "tools/winnow/demo/text_reader.h"
#include "tools/winnow/progress.h"
#include <nlohmann/json.hpp>

namespace winnow::demo {

inline constexpr std::int64_t kStretch = 64;  // tokens of the picture
inline constexpr std::int64_t kBatch = 48;    // queries per training step

struct Check {
  std::string what;
  std::string found;  // "1.2e-07, at most 2e-05"
  bool passed = false;
};

// Filled in by a step.
class StepReport {
 public:
  std::string name;
  std::string size;               // "2048 tokens, 16 heads"
  std::vector<std::string> done;  // sentences
  double seconds = 0;
  nlohmann::ordered_json numbers;  // for programs

  // NaN passes neither.
  void at_most(const std::string& what, double value, double limit);
  void at_least(const std::string& what, double value, double limit);
  void require(const std::string& what, bool passed);

  bool passed() const;
  const std::vector<Check>& checks() const { return checks_; }

 private:
  std::vector<Check> checks_;
};

// The first step comes below the titles of the columns.
void print_step(std::ostream& out, int number, const StepReport& step);

// A quantity of the summary before and after training.
struct Change {
  std::string what;
  double before = 0;
  double after = 0;
  std::string note;  // "best possible 0.81"; may be empty
};

// Which experts the tokens go to.
inline constexpr int kExpertTopk = 8;

struct Routing {
  Tensor experts;  // [tokens, kExpertTopk] i32, by falling score, none twice
  Tensor weights;  // [tokens, kExpertTopk] f32
};

// The share of the dense attention that rules without learning capture with as many tokens.
struct ReferenceShares {
  double best = 0;  // those that get most attention: no choice can do better
  double recent = 0;
  double random = 0;
};

// Points of the training curves.
struct TrainingCurves {
  std::vector<double> loss;              // of the batch, per step
  std::vector<double> evaluated_at;      // steps done
  std::vector<double> held_out_loss;     // KL to the dense attention of the held-out queries
  std::vector<double> held_out_capture;  // share of it that the top-k captures
};

// Made ready by run_demo: options, document, placement, progress. A step may use what the steps
// before it in the list have made.
struct DemoState {
  DemoState(const DemoOptions& given, std::ostream& err)
      : options(given), progress(err, given.progress) {}

  const DemoOptions& options;
  Document document;
  Placement placement;  // of the layer
  cli::Progress progress;

  // Step document.
  std::int64_t topk = 0;
  std::vector<std::int64_t> all_queries;  // 0, 1, ...
  std::vector<std::int64_t> training_queries;
  std::vector<std::int64_t> held_out_queries;  // never trained on
  std::vector<std::int64_t> stretch_queries;   // the picture's; never trained on either

  // Step embedding.
  std::optional<Layer> layer;

  // Step dense.
  DenseAttention held_out;
  DenseAttention stretch;
  ReferenceShares references;

  // Step indexer; trained in step training.
  std::optional<Indexer> indexer;
  Selection chosen;             // for all queries; afresh after training
  Selection stretch_untrained;  // for the stretch

  // Step forward; afresh after training.
  LayerOutput output;

  // Step experts.
  int experts = 0;
  Routing routing;  // of all tokens

  TrainingCurves curves;
  std::vector<Change> changes;     // for the summary
  std::vector<std::string> files;  // written
};

// The rows of `all` that belong to the queries at `positions`; `all` is of every query.
Selection selection_at(const Selection& all, const std::vector<std::int64_t>& positions);

// The steps of the demo; demo.cc has their order.
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
