#include <algorithm>

#include "tools/winnow/demo/pictures.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/picture/color_scale.h"
#include "tools/winnow/picture/heat_map.h"
#include "tools/winnow/picture/text.h"

namespace winnow::demo {
namespace {

using picture::Box;
using picture::Color;

constexpr double kMostWeight = 0.5;  // and above: the darkest
constexpr double kCellWidth = 20;
constexpr double kCellHeight = 10;
constexpr double kLeft = 140;
constexpr double kTop = 124;
constexpr double kRight = 28;
constexpr double kFooter = 140;
constexpr Color kBand{214, 226, 238};

// Pale where there is a weight at all, so that it stands out from the band.
Color weight_color(double place) { return picture::heat_color(0.2 + 0.8 * place); }

}  // namespace

picture::Image draw_experts(const DemoState& state) {
  const int ranks = static_cast<int>(state.options.ranks);
  const int experts_per_rank = state.experts / ranks;
  const std::int64_t begin = state.stretch_queries.front();
  const double band_height = kCellHeight * experts_per_rank;
  const Box map{kLeft, kTop, kCellWidth * double(kStretch), kCellHeight * state.experts};
  picture::Image image(int(map.x + map.width + kRight), int(map.y + map.height + kFooter));
  picture::draw_text(
      image, {28, 42},
      format_text("Which of %d experts on %d ranks the tokens %lld to %lld of %s go to",
                  state.experts, ranks, static_cast<long long>(begin),
                  static_cast<long long>(begin + kStretch - 1), short_name(state.document).c_str()),
      26, picture::kInk);

  int rows = 0;
  const ConstTensorView experts = state.routing.experts, weights = state.routing.weights;
  for (std::int64_t i = 0; i < kStretch; ++i) {
    const double x = map.x + kCellWidth * double(i);
    std::vector<bool> reached(static_cast<std::size_t>(ranks));
    for (int k = 0; k < kExpertTopk; ++k) {
      const int rank = experts.at<std::int32_t>(begin + i, k) / experts_per_rank;
      if (reached[rank]) continue;
      reached[rank] = true;
      ++rows;
      image.fill({x + 1, map.y + rank * band_height, kCellWidth - 2, band_height}, kBand);
    }
    for (int k = 0; k < kExpertTopk; ++k) {
      const double place = std::min(1.0, weights.at<float>(begin + i, k) / kMostWeight);
      image.fill({x, map.y + kCellHeight * experts.at<std::int32_t>(begin + i, k), kCellWidth,
                  kCellHeight},
                 weight_color(place));
    }
  }
  picture::draw_text(image, {28, 74},
                     format_text("A column is a token and a line an expert. A cell from yellow to "
                                 "violet: the token goes to that expert (%d cells).",
                                 int(kStretch) * kExpertTopk),
                     17, picture::kGray);
  picture::draw_text(image, {28, 98},
                     format_text("A blue band: the token's row is sent to that rank, once for all "
                                 "of its experts there (%d rows).",
                                 rows),
                     17, picture::kGray);

  for (int rank = 0; rank < ranks; ++rank) {
    const double y = map.y + rank * band_height;
    image.fill({map.x, y - 0.5, map.width, 1}, picture::kGray);
    const bool tall = band_height >= 44;
    picture::draw_text(image, {map.x - 12, y + band_height / 2 + (tall ? -4 : 6)},
                       format_text("rank %d", rank), 17, picture::kInk, picture::Align::right);
    if (!tall) continue;
    picture::draw_text(
        image, {map.x - 12, y + band_height / 2 + 16},
        format_text("experts %d to %d", rank * experts_per_rank, (rank + 1) * experts_per_rank - 1),
        14, picture::kGray, picture::Align::right);
  }
  image.frame({map.x - 1, map.y - 1, map.width + 2, map.height + 2}, picture::kGray);
  const std::vector<std::string> labels = token_labels(state.document.text, begin);
  for (std::int64_t i = 0; i < kStretch; ++i) {
    picture::draw_text(image, {map.x + kCellWidth * (double(i) + 0.5), map.y + map.height + 20},
                       labels[i], 16, picture::kInk, picture::Align::center);
  }
  picture::draw_color_bar(image, {map.x, map.y + map.height + 80, 560, 16},
                          "weight of the expert's output", weight_color,
                          {"0", "0.25", "0.5 or more"});
  return image;
}

}  // namespace winnow::demo
