// What compressor::step does, from the whole history of a sequence in double precision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "winnow/compressor/compressor_oracle.h"
#include "winnow/compressor/step/step.h"

namespace winnow::compressor::oracle {

// The tokens of one sequence so far.
struct History {
  Vector kv, gate;  // [tokens, columns]
};

// Takes the new tokens of each sequence with a state into its history, from first_position on, and
// gives the rows of all tokens: `absent` where the token completes none.
inline Vector step(const StepArgs& args, std::vector<History>& histories, double absent) {
  const Inputs in = inputs_of(args);
  const std::int64_t columns = args.kv.size(1);
  const Vector slots = winnow::testing::read(args.state_slots);
  Vector rows(static_cast<std::size_t>(args.kv.size(0) * in.d), absent);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    History& history = histories[static_cast<std::size_t>(slots[i])];
    const auto first = static_cast<std::int64_t>(in.first_position[i]);
    const auto begin = static_cast<std::int64_t>(in.cu_seqlens[i]);
    const auto end = static_cast<std::int64_t>(in.cu_seqlens[i + 1]);
    const auto kept = static_cast<std::size_t>(first * columns);
    const auto take = [&](Vector& to, const Matrix& from) {
      to.resize(kept);
      to.insert(to.end(), from.values.begin() + begin * columns,
                from.values.begin() + end * columns);
    };
    take(history.kv, in.kv);
    take(history.gate, in.gate);
    Inputs whole = in;
    whole.kv = {history.kv, columns};
    whole.gate = {history.gate, columns};
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t position = first + t - begin;
      if ((position + 1) % in.ratio != 0) continue;
      const std::int64_t w = position / in.ratio;
      const Vector row = row_of(whole, 0, w, w * in.ratio);
      std::copy(row.begin(), row.end(), rows.begin() + t * in.d);
    }
  }
  return rows;
}

// What the token at that position has left in the state: kv, then the gates with their bias.
inline Vector place_of(const StepArgs& args, const History& history, std::int64_t position) {
  const Matrix bias = matrix(args.position_bias);
  const std::int64_t columns = args.kv.size(1), ratio = args.position_bias.size(0);
  const auto begin = static_cast<std::ptrdiff_t>(position * columns);
  Vector place(history.kv.begin() + begin, history.kv.begin() + begin + columns);
  for (std::int64_t c = 0; c < columns; ++c) {
    place.push_back(history.gate[static_cast<std::size_t>(begin + c)] +
                    bias.at(position % ratio, c));
  }
  return place;
}

}  // namespace winnow::compressor::oracle
