#include "tools/winnow/demo/indexer.h"

#include <limits>

#include <gtest/gtest.h>

namespace winnow::demo {
namespace {

constexpr std::int64_t kTokens = 40;
constexpr std::int64_t kWidth = 24;
constexpr std::int64_t kTopk = 6;

Matrix random_rows(Random& random) { return random_matrix(kTokens, kWidth, 1, random); }

TEST(Selection, RulesChooseEarlierTokensOnce) {
  Random random(1);
  const std::vector<std::int64_t> positions = {0, 3, 17, 39};
  const Selection recent = choose_recent(positions, kTopk);
  const Selection chance = choose_random(positions, kTopk, random);
  EXPECT_TRUE(is_sound(recent));
  EXPECT_TRUE(is_sound(chance));
  EXPECT_TRUE(is_sound(with_exploration(chance, random)));
  EXPECT_EQ(std::vector<std::int32_t>(recent.row(2).begin(), recent.row(2).end()),
            (std::vector<std::int32_t>{12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(std::vector<std::int32_t>(recent.row(1).begin(), recent.row(1).end()),
            (std::vector<std::int32_t>{0, 1, 2, 3, -1, -1}));
}

TEST(Selection, SoundnessNoticesFaults) {
  const std::vector<std::int64_t> positions = {10};
  const Selection good = choose_recent(positions, 3);  // 8, 9, 10
  for (const std::int32_t wrong : {-1, 8, 11}) {
    Selection bad = good;
    bad.entries[2] = wrong;
    EXPECT_FALSE(is_sound(bad)) << wrong;
  }
}

TEST(Selection, NanComesLast) {
  const std::vector<std::int64_t> positions = {5};
  const Selection chosen = choose_best(positions, 3, [](std::int64_t, std::int64_t token) {
    return token >= 3 ? std::numeric_limits<double>::quiet_NaN() : double(token);
  });
  EXPECT_EQ(chosen.entries, (std::vector<std::int32_t>{0, 1, 2}));
}

// The gradient by hand against central differences of the loss along a random direction.
TEST(Indexer, GradientMatchesFiniteDifferences) {
  constexpr double kStep = 1e-3;       // short: dot products that change their sign bend the loss
  constexpr double kTolerance = 5e-3;  // the loss is of f32 scores
  Random random(2);
  const Matrix x = random_rows(random);
  const std::vector<std::int64_t> positions = {4, 20, 39};
  const Selection entries = choose_random(positions, kTopk, random);
  std::vector<float> teacher;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    double sum = 0;
    std::vector<double> row;
    for (const std::int32_t token : entries.row(static_cast<std::int64_t>(i))) {
      row.push_back(token >= 0 ? random.uniform() : 0.0);
      sum += row.back();
    }
    for (const double value : row) teacher.push_back(static_cast<float>(value / sum));
  }
  Indexer indexer(kWidth, random);
  indexer.maps.query *= 2;
  indexer.maps.key *= 2;
  indexer.maps.weight *= 4;
  const auto loss_of = [&](const Indexer& model) {
    return model.gradient(x, model.project(x, positions), entries, teacher).loss;
  };
  const IndexerGradient gradient =
      indexer.gradient(x, indexer.project(x, positions), entries, teacher);
  EXPECT_GT(gradient.loss, 0);
  for (Matrix IndexerMaps::* const map :
       {&IndexerMaps::query, &IndexerMaps::key, &IndexerMaps::weight}) {
    const Matrix& part = gradient.maps.*map;
    const Matrix direction = part / part.norm();
    const auto loss_at = [&](double distance) {
      Indexer moved = indexer;
      moved.maps.*map += static_cast<float>(distance) * direction;
      return loss_of(moved);
    };
    const double measured = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
    EXPECT_NEAR(measured / double(part.norm()), 1.0, kTolerance);
  }
}

TEST(Indexer, AdamLowersTheLoss) {
  // With some seeds max(0, .) ends at 0 for all rows of a query, without a gradient.
  Random random(1);
  const Matrix x = random_rows(random);
  const std::vector<std::int64_t> positions = {10, 30};
  const Selection entries = choose_recent(positions, kTopk);
  std::vector<float> teacher(2 * kTopk, 0.02f);
  teacher[0] = teacher[kTopk + 3] = 0.9f;
  Indexer indexer(kWidth, random);
  Adam adam(indexer);
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const IndexerGradient gradient =
        indexer.gradient(x, indexer.project(x, positions), entries, teacher);
    (step == 0 ? first : last) = gradient.loss;
    adam.update(indexer, gradient, 0.002);
  }
  EXPECT_LT(last, 0.1 * first);
}

}  // namespace
}  // namespace winnow::demo
