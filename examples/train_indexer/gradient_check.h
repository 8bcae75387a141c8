// Compares the hand-written gradients with finite differences of the losses.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <utility>

#include "model.h"

// Moves each weight matrix of a small model in both directions along a random half of its gradient,
// compares the central difference of the loss with the gradient, and prints both.
inline bool gradients_are_right(Machine& machine, const winnow::Tensor& text, winnow::DType dtype) {
  constexpr double kStep = 0.05;  // length of the move; rounding dominates shorter ones
  ModelShape shape{.tokens = 48, .heads = 3, .width = 24, .topk = 12, .index_heads = 3};
  shape.dtype = dtype;
  const double tolerance = dtype == winnow::DType::f32 ? 0.01 : 0.05;  // relative to the slope
  Model model(machine, shape, 1);
  std::mt19937_64 random(7);
  const winnow::ConstTensorView piece = text.view().slice(0, 0, shape.tokens + 1);
  const auto losses = [&] {  // with the same chosen rows every time
    model.project(piece);
    model.project_indexer();
    const double language = model.predict(true);
    model.learn();
    return std::pair(language, model.teach());
  };
  model.project(piece);
  model.project_indexer();
  model.choose();
  bool right = true;
  const auto check = [&](const char* name, Parameter& parameter, bool of_indexer) {
    losses();
    winnow::Tensor direction = parameter.gradient.to({});
    double slope = 0;
    for (float& number : direction.values<float>()) {
      if (random() % 2 == 0) number = 0;
      slope += double(number) * number;
    }
    slope = std::sqrt(slope);
    const winnow::Tensor before = parameter.value.to({});
    double after[2];
    for (const int side : {0, 1}) {
      winnow::Tensor moved = before.clone();
      const double step = (side == 0 ? -kStep : kStep) / slope;
      for (std::size_t i = 0; i < moved.values<float>().size(); ++i) {
        moved.values<float>()[i] += static_cast<float>(step * direction.values<float>()[i]);
      }
      parameter.value = moved.to(machine.device());
      const auto [language, kl] = losses();
      after[side] = of_indexer ? kl : language;
    }
    parameter.value = before.to(machine.device());
    const double difference = (after[1] - after[0]) / (2 * kStep);
    const bool close = std::abs(difference - slope) <= tolerance * slope;
    std::printf("gradient of %-13s by hand %.6f, by differences %.6f%s\n", name, slope, difference,
                close ? "" : "  WRONG");
    right = right && close;
  };
  const char* main_names[] = {"embedding", "query", "latent", "output", "unembedding"};
  const char* indexer_names[] = {"indexer query", "indexer key", "indexer weight"};
  for (int i = 0; i < 5; ++i) check(main_names[i], *model.main()[i], false);
  for (int i = 0; i < 3; ++i) check(indexer_names[i], *model.indexer()[i], true);
  std::printf(right ? "all gradients are right\n\n" : "some gradients are wrong\n\n");
  return right;
}
