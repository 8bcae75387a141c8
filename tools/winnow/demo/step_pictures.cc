// Step 12: the pictures.
#include "tools/winnow/demo/output_directory.h"
#include "tools/winnow/demo/pictures.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

constexpr std::string_view kPngSignature = "\x89PNG\r\n\x1a\n";

}  // namespace

void run_pictures_step(DemoState& state, StepReport& report) {
  const picture::Image attention = draw_attention(state);
  const picture::Image training = draw_training(state);
  const picture::Image experts = draw_experts(state);
  const std::string attention_png = picture::encode_png(attention);
  const std::string training_png = picture::encode_png(training);
  const std::string experts_png = picture::encode_png(experts);
  state.files = {write_file(state.options.out_dir, "attention.png", attention_png),
                 write_file(state.options.out_dir, "training.png", training_png),
                 write_file(state.options.out_dir, "experts.png", experts_png)};
  report.size =
      format_text("%d x %d, %d x %d and %d x %d pixels", attention.width(), attention.height(),
                  training.width(), training.height(), experts.width(), experts.height());
  report.done.push_back("attention.png: what full attention looks at, what the top-k kept of it");
  report.done.push_back("training.png: loss and captured share over the steps");
  report.done.push_back("experts.png: which experts, and which ranks, a token goes to");
  report.require("all are PNG files", attention_png.starts_with(kPngSignature) &&
                                          training_png.starts_with(kPngSignature) &&
                                          experts_png.starts_with(kPngSignature));
  report.numbers = {
      {"attention", state.files[0]}, {"training", state.files[1]}, {"experts", state.files[2]}};
}

}  // namespace winnow::demo
