#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tools/winnow/demo/pictures.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/picture/color_scale.h"
#include "tools/winnow/picture/heat_map.h"
#include "tools/winnow/picture/text.h"

namespace winnow::demo {
namespace {

using picture::Color;

// Shares of attention span decades; colours follow their logarithm.
constexpr double kLeastShare = 1e-4;
constexpr double kMostShare = 1e-1;
constexpr double kMargin = 28;
constexpr double kGap = 30;
constexpr double kHeader = 64;
constexpr double kFooter = 84;

double place_on_scale(double share) {
  if (!(share > kLeastShare)) return 0;
  return std::min(1.0, std::log(share / kLeastShare) / std::log(kMostShare / kLeastShare));
}

}  // namespace

std::string short_name(const Document& document) {
  constexpr std::size_t kLongest = 80;
  const std::string name = std::filesystem::path(document.name).filename().string();
  return name.size() <= kLongest ? name : name.substr(0, kLongest) + "\u2026";
}

std::vector<std::string> token_labels(const std::string& text, std::int64_t begin) {
  std::vector<std::string> labels;
  for (std::int64_t i = 0; i < kStretch; ++i) {
    const std::span<const char> rest = std::span(text).subspan(static_cast<std::size_t>(begin + i));
    const std::size_t length = utf8_character_length(rest);
    const unsigned char lead = static_cast<unsigned char>(rest[0]);
    if (lead == '\n') {
      labels.push_back("\u21b5");
    } else if (lead == ' ') {
      labels.push_back("\u2423");
    } else if (lead == '\t') {
      labels.push_back("\u2192");
    } else if (lead < 0x20 || lead == 0x7f || length == 0) {
      labels.push_back("\u00b7");
    } else {
      labels.emplace_back(rest.data(), length);
    }
  }
  return labels;
}

picture::Image draw_attention(const DemoState& state) {
  const DenseAttention& dense = state.stretch;
  const std::int64_t begin = dense.positions.front();
  const Selection trained = selection_at(state.chosen, dense.positions);
  const auto share = [&](int row, int column) { return dense.share(row, begin + column); };
  const auto kept = [&](const Selection& selection, int row, int column) {
    const std::span<const std::int32_t> entries = selection.row(row);
    return std::binary_search(entries.begin(), std::find(entries.begin(), entries.end(), -1),
                              begin + column);
  };
  const auto selection_color = [&](const Selection& selection) {
    return [&](int row, int column) -> Color {
      if (column > row) return picture::kWhite;
      const double place = place_on_scale(share(row, column));
      return kept(selection, row, column) ? picture::heat_color(place) : picture::cold_color(place);
    };
  };

  picture::HeatMap map;
  map.labels = token_labels(state.document.text, begin);
  map.x_title = "key: the token that is looked at";
  map.y_title = "query: the token that looks";
  std::vector<picture::HeatMap> maps(3, map);
  maps[0].title = "Full attention";
  maps[0].subtitle = "all heads together, over all earlier tokens";
  maps[0].color = [&](int row, int column) -> Color {
    if (column > row) return picture::kWhite;
    return picture::heat_color(place_on_scale(share(row, column)));
  };
  maps[1].title = "What the untrained indexer keeps";
  maps[1].subtitle = format_text(
      "the %lld keys of highest score hold %.0f %% of these queries' attention",
      static_cast<long long>(state.topk), 100 * captured_share(dense, state.stretch_untrained));
  maps[1].color = selection_color(state.stretch_untrained);
  maps[2].title = "What the trained indexer keeps";
  maps[2].subtitle =
      format_text("the %lld keys of highest score hold %.0f %% of these queries' attention",
                  static_cast<long long>(state.topk), 100 * captured_share(dense, trained));
  maps[2].color = selection_color(trained);

  const picture::Box extent = picture::heat_map_extent(map);
  const double width = 2 * kMargin + 3 * extent.width + 2 * kGap;
  picture::Image image(int(width), int(kHeader + extent.height + kFooter));
  picture::draw_text(
      image, {kMargin, 42},
      format_text("Where a sparse attention layer looks: tokens %lld to %lld of %s",
                  static_cast<long long>(begin), static_cast<long long>(begin + kStretch - 1),
                  short_name(state.document).c_str()),
      30, picture::kInk);
  for (int i = 0; i < 3; ++i) {
    picture::draw_heat_map(image, {kMargin + i * (extent.width + kGap), kHeader}, maps[i]);
  }
  const std::vector<std::string> ticks = {"0.01 % or less", "0.1 %", "1 %", "10 % or more"};
  const double bar_top = kHeader + extent.height + 28;
  // One key below all maps: what the three colours of a cell mean.
  picture::draw_color_bar(
      image, {kMargin + 52, bar_top, 560, 16},
      "yellow to violet: a key that is attended to, by its share in full attention",
      picture::heat_color, ticks);
  picture::draw_color_bar(
      image, {kMargin + extent.width + kGap + 52, bar_top, 560, 16},
      "blue: a key that the indexer left out, by the share that is lost with it",
      picture::cold_color, ticks);
  picture::draw_text(image, {kMargin + 2 * (extent.width + kGap) + 52, bar_top - 10},
                     "white: a later token, which the query does not see", 17, picture::kInk);
  return image;
}

}  // namespace winnow::demo
