// Exact comparisons with the oracle, and the list of those of many calls and ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/operation.h"

namespace winnow::expert_parallel {

testing::Comparison compare_number(std::string_view what, std::int64_t actual,
                                   std::int64_t expected);
// The dtype, the shape and every element of a tensor of integers.
testing::Comparison compare_integers(std::string_view what, const ConstTensorView& actual,
                                     DType dtype, std::initializer_list<std::int64_t> shape,
                                     const std::vector<std::int64_t>& expected);
// The dtype, the shape and the bits.
testing::Comparison compare_bits(std::string_view what, const ConstTensorView& actual,
                                 const ConstTensorView& expected);

// The comparisons of many calls and ranks; for each name the worst one is kept.
class Comparisons {
 public:
  void add(const testing::Comparison& comparison);
  void add(const Comparisons& others, int rank);
  // Notes that a call has run on `backend`. All calls of all ranks must run on the same one.
  void ran_on(Backend backend);
  // Absent: no call has run.
  std::optional<Backend> backend() const { return backend_; }
  const std::vector<testing::Comparison>& list() const { return list_; }
  bool passed() const;
  // Where no call has run, the comparisons say why.
  testing::CaseOutcome outcome() const { return {backend_.value_or(Backend::cpu), list_}; }

 private:
  std::vector<testing::Comparison> list_;
  std::optional<Backend> backend_;
};

// Those of all ranks of the team, on which the body runs as RankTeam::run() does it.
Comparisons compare_on_ranks(
    RankTeam& team,
    const std::function<Comparisons(int rank, const std::shared_ptr<Transport>& transport)>& body);

}  // namespace winnow::expert_parallel
