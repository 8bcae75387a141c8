// Step 12: the pictures.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tools/winnow/demo/output_directory.h"
#include "tools/winnow/demo/picture.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"

namespace winnow::demo {
namespace {

using picture::Box;
using picture::Color;
using picture::Image;
using Align = Image::Align;

// The document's file name without folders, for titles.
std::string short_name(const Document& document) {
  constexpr std::size_t kLongest = 80;
  const std::string name = std::filesystem::path(document.name).filename().string();
  return name.size() <= kLongest ? name : name.substr(0, kLongest) + "\u2026";
}

// A label for each token of the stretch: the character that begins at its byte. White space and
// control characters get a visible sign, the further bytes of a character a dot.
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

// Three maps of a stretch of the text, queries x keys: what full attention looks at, and which of
// it the top-k kept before and after training.
Image draw_attention(const DemoState& state) {
  constexpr double kMargin = 28, kGap = 30, kHeader = 64, kFooter = 84;
  const DenseAttention& dense = state.stretch;
  const std::int64_t begin = dense.positions.front();
  const Selection trained = selection_at(state.chosen, dense.positions);
  // Shares of attention span decades; colours follow their logarithm.
  const auto place_on_scale = [&](int row, int column) {
    constexpr double kLeastShare = 1e-4, kMostShare = 1e-1;
    const double share = dense.share(row, begin + column);
    if (!(share > kLeastShare)) return 0.0;
    return std::min(1.0, std::log(share / kLeastShare) / std::log(kMostShare / kLeastShare));
  };
  const auto color_by = [&](const Selection* selection) {
    return [&, selection](int row, int column) -> Color {
      if (column > row) return picture::kWhite;
      const double place = place_on_scale(row, column);
      if (selection == nullptr) return picture::heat_color(place);
      const std::span<const std::int32_t> kept = selection->row(row);
      return std::ranges::count(kept, begin + column) != 0 ? picture::heat_color(place)
                                                           : picture::cold_color(place);
    };
  };
  const auto held = [&](const Selection& selection) {
    return format_text("the %ld keys of highest score hold %.0f %% of these queries' attention",
                       state.topk, 100 * captured_share(dense, selection));
  };
  const auto map = [&](std::string title, std::string subtitle, const Selection* selection) {
    return picture::HeatMap{.title = std::move(title),
                            .subtitle = std::move(subtitle),
                            .x_title = "key: the token that is looked at",
                            .y_title = "query: the token that looks",
                            .labels = token_labels(state.document.text, begin),
                            .color = color_by(selection)};
  };
  const picture::HeatMap maps[] = {
      map("Full attention", "all heads together, over all earlier tokens", nullptr),
      map("What the untrained indexer keeps", held(state.stretch_untrained),
          &state.stretch_untrained),
      map("What the trained indexer keeps", held(trained), &trained)};

  const Box extent = picture::heat_map_extent(maps[0]);
  const auto left_of = [&](int i) { return kMargin + i * (extent.width + kGap); };
  Image image(int(left_of(3) - kGap + kMargin), int(kHeader + extent.height + kFooter));
  image.text({kMargin, 42},
             format_text("Where a sparse attention layer looks: tokens %ld to %ld of %s", begin,
                         begin + kStretch - 1, short_name(state.document).c_str()),
             30, picture::kInk);
  for (int i = 0; i < 3; ++i) picture::draw_heat_map(image, {left_of(i), kHeader}, maps[i]);
  // One key below all maps: what the three colours of a cell mean.
  const std::vector<std::string> ticks = {"0.01 % or less", "0.1 %", "1 %", "10 % or more"};
  const double bar_top = kHeader + extent.height + 28;
  picture::draw_color_bar(
      image, {left_of(0) + 52, bar_top, 560, 16},
      "yellow to violet: a key that is attended to, by its share in full attention",
      picture::heat_color, ticks);
  picture::draw_color_bar(
      image, {left_of(1) + 52, bar_top, 560, 16},
      "blue: a key that the indexer left out, by the share that is lost with it",
      picture::cold_color, ticks);
  image.text({left_of(2) + 52, bar_top - 10}, "white: a later token, which the query does not see",
             17, picture::kInk);
  return image;
}

// Loss and captured share over the steps, with what the best, the most recent and random tokens
// capture.
Image draw_training(const DemoState& state) {
  constexpr Color kMain{200, 62, 48}, kFaint{236, 178, 150}, kBest{46, 117, 89},
      kRecent{49, 101, 161}, kChance{120, 126, 134};
  const TrainingCurves& curves = state.curves;
  const auto evaluated = [&](const std::vector<double>& y) {
    std::vector<picture::Point> result;
    for (std::size_t i = 0; i < y.size(); ++i) result.push_back({curves.evaluated_at[i], y[i]});
    return result;
  };
  std::vector<picture::Point> batches;
  for (const double loss : curves.loss) batches.push_back({double(batches.size()), loss});
  const picture::LineChart loss = {
      .title = "Loss of the indexer",
      .subtitle = "KL divergence from the attention distribution, in nats",
      .x_title = "training steps",
      .lines = {{"training batch", kFaint, 2, batches},
                {"held-out queries", kMain, 3, evaluated(curves.held_out_loss)}},
      .levels = {}};

  const auto with_percent = [](const char* name, double share) {
    return format_text("%s %.0f %%", name, 100 * share);
  };
  const auto level = [&](const char* name, Color color, double share) -> picture::Line {
    return {with_percent(name, share), color, 1.6, {{0, share}}};
  };
  const picture::LineChart capture = {
      .title = "Attention that the top-k captures",
      .subtitle = format_text("%ld of up to %ld tokens, held-out queries", state.topk,
                              state.layer->tokens()),
      .x_title = "training steps",
      .percent = true,
      .lines = {{with_percent("indexer", curves.held_out_capture.back()), kMain, 3,
                 evaluated(curves.held_out_capture)}},
      .levels = {level("best possible", kBest, state.references.best),
                 level("most recent", kRecent, state.references.recent),
                 level("random", kChance, state.references.random)}};

  Image image(1760, 680);
  image.text({40, 44}, "The indexer learns where to look in " + short_name(state.document), 30,
             picture::kInk);
  picture::draw_line_chart(image, {20, 76, 850, 590}, loss);
  picture::draw_line_chart(image, {890, 76, 850, 590}, capture);
  return image;
}

// The same stretch, experts x tokens: which experts a token goes to, and to which ranks it travels.
Image draw_experts(const DemoState& state) {
  constexpr double kMostWeight = 0.5;  // and above: the darkest
  constexpr double kCellWidth = 20, kCellHeight = 10;
  constexpr Color kBand{214, 226, 238};
  // Pale where there is a weight at all, so that it stands out from the band.
  const auto weight_color = [](double place) { return picture::heat_color(0.2 + 0.8 * place); };
  const int ranks = static_cast<int>(state.options.ranks);
  const int experts_per_rank = state.experts / ranks;
  const std::int64_t begin = state.stretch_queries.front();
  const double band_height = kCellHeight * experts_per_rank;
  const Box map{140, 124, kCellWidth * double(kStretch), kCellHeight * state.experts};
  Image image(int(map.x + map.width + 28), int(map.y + map.height + 140));
  image.text({28, 42},
             format_text("Which of %d experts on %d ranks the tokens %ld to %ld of %s go to",
                         state.experts, ranks, begin, begin + kStretch - 1,
                         short_name(state.document).c_str()),
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
      image.fill({x, map.y + kCellHeight * experts.at<std::int32_t>(begin + i, k), kCellWidth,
                  kCellHeight},
                 weight_color(std::min(1.0, weights.at<float>(begin + i, k) / kMostWeight)));
    }
  }
  image.text({28, 74},
             format_text("A column is a token and a line an expert. A cell from yellow to violet: "
                         "the token goes to that expert (%d cells).",
                         int(kStretch) * kExpertTopk),
             17, picture::kGray);
  image.text({28, 98},
             format_text("A blue band: the token's row is sent to that rank, once for all of its "
                         "experts there (%d rows).",
                         rows),
             17, picture::kGray);

  for (int rank = 0; rank < ranks; ++rank) {
    const double y = map.y + rank * band_height;
    const bool tall = band_height >= 44;
    image.fill({map.x, y, map.width, 1}, picture::kGray);
    image.text({map.x - 12, y + band_height / 2 + (tall ? -4 : 6)}, format_text("rank %d", rank),
               17, picture::kInk, Align::end);
    if (!tall) continue;
    image.text(
        {map.x - 12, y + band_height / 2 + 16},
        format_text("experts %d to %d", rank * experts_per_rank, (rank + 1) * experts_per_rank - 1),
        14, picture::kGray, Align::end);
  }
  image.frame({map.x - 1, map.y - 1, map.width + 2, map.height + 2}, picture::kGray);
  const std::vector<std::string> labels = token_labels(state.document.text, begin);
  for (std::int64_t i = 0; i < kStretch; ++i) {
    image.text({map.x + kCellWidth * (double(i) + 0.5), map.y + map.height + 20}, labels[i], 16,
               picture::kInk, Align::middle);
  }
  picture::draw_color_bar(image, {map.x, map.y + map.height + 80, 560, 16},
                          "weight of the expert's output", weight_color,
                          {"0", "0.25", "0.5 or more"});
  return image;
}

}  // namespace

void run_pictures_step(DemoState& state, StepReport& report) {
  struct Picture {
    const char *name, *shows;
    Image image;
  };
  const Picture pictures[] = {
      {"attention", "what full attention looks at, what the top-k kept of it",
       draw_attention(state)},
      {"training", "loss and captured share over the steps", draw_training(state)},
      {"experts", "which experts, and which ranks, a token goes to", draw_experts(state)}};
  bool whole = true;
  for (const auto& [name, shows, image] : pictures) {
    const std::string file = std::string(name) + ".svg", svg = image.svg();
    whole = whole && svg.starts_with("<svg ") && svg.ends_with("</svg>\n");
    state.files.push_back(write_file(state.options.out_dir, file, svg));
    report.size +=
        format_text("%s%d x %d", report.size.empty() ? "" : ", ", image.width(), image.height());
    report.done.push_back(file + ": " + shows);
    report.numbers.push_back({name, state.files.back()});
  }
  report.size += " pixels";
  report.require("all are SVG files", whole);
}

}  // namespace winnow::demo
