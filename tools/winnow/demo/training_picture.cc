#include "tools/winnow/demo/pictures.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/picture/line_chart.h"
#include "tools/winnow/picture/text.h"

namespace winnow::demo {
namespace {

using picture::Color;

constexpr Color kMain{200, 62, 48};
constexpr Color kFaint{236, 178, 150};
constexpr Color kBest{46, 117, 89};
constexpr Color kRecent{49, 101, 161};
constexpr Color kChance{120, 126, 134};

std::vector<picture::Point> points(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<picture::Point> result;
  for (std::size_t i = 0; i < x.size(); ++i) result.push_back({x[i], y[i]});
  return result;
}

std::string with_percent(const char* name, double share) {
  return format_text("%s %.0f %%", name, 100 * share);
}

}  // namespace

picture::Image draw_training(const DemoState& state) {
  const TrainingCurves& curves = state.curves;
  std::vector<double> steps;
  for (std::size_t i = 0; i < curves.loss.size(); ++i) steps.push_back(static_cast<double>(i));

  picture::LineChart loss;
  loss.title = "Loss of the indexer";
  loss.subtitle = "KL divergence from the attention distribution, in nats";
  loss.x_title = "training steps";
  loss.lines.push_back({"training batch", kFaint, 2.0, points(steps, curves.loss)});
  loss.lines.push_back(
      {"held-out queries", kMain, 3.0, points(curves.evaluated_at, curves.held_out_loss)});

  picture::LineChart capture;
  capture.title = "Attention that the top-k captures";
  capture.subtitle =
      format_text("%lld of up to %lld tokens, held-out queries", static_cast<long long>(state.topk),
                  static_cast<long long>(state.layer->tokens()));
  capture.x_title = "training steps";
  capture.percent = true;
  capture.levels = {
      {with_percent("best possible", state.references.best), kBest, state.references.best},
      {with_percent("most recent", state.references.recent), kRecent, state.references.recent},
      {with_percent("random", state.references.random), kChance, state.references.random}};
  capture.lines.push_back({with_percent("indexer", curves.held_out_capture.back()), kMain, 3.0,
                           points(curves.evaluated_at, curves.held_out_capture)});

  picture::Image image(1760, 680);
  picture::draw_text(image, {40, 44},
                     "The indexer learns where to look in " + short_name(state.document), 30,
                     picture::kInk);
  picture::draw_line_chart(image, {20, 76, 850, 590}, loss);
  picture::draw_line_chart(image, {890, 76, 850, 590}, capture);
  return image;
}

}  // namespace winnow::demo
