// What the steps of the demo hand on to one another.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/winnow/demo/demo.h"
#include "tools/winnow/demo/layer.h"
#include "tools/winnow/demo/report.h"
#include "tools/winnow/demo/routing.h"
#include "tools/winnow/demo/selection.h"
#include "tools/winnow/demo/text_reader.h"
#include "tools/winnow/progress.h"

namespace winnow::demo {

class Indexer;  // needs Eigen

inline constexpr std::int64_t kStretch = 64;  // tokens of the picture
inline constexpr std::int64_t kBatch = 48;    // queries per training step

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
  std::shared_ptr<Indexer> indexer;
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

}  // namespace winnow::demo
