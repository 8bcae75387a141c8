#include "winnow/expert_parallel/testing/comparisons.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "winnow/testing/compare.h"

namespace winnow::expert_parallel {

testing::Comparison compare_number(std::string_view what, std::int64_t actual,
                                   std::int64_t expected) {
  testing::Comparison result{std::string(what), 0, 0, actual == expected, ""};
  if (!result.passed) {
    result.error = 1;
    result.detail = "want " + std::to_string(expected) + ", got " + std::to_string(actual);
  }
  return result;
}

testing::Comparison compare_integers(std::string_view what, const ConstTensorView& actual,
                                     DType dtype, std::initializer_list<std::int64_t> shape,
                                     const std::vector<std::int64_t>& expected) {
  testing::Comparison result{std::string(what), 1, 0, false, ""};
  if (!actual.present() || actual.dtype() != dtype || !std::ranges::equal(actual.shape(), shape)) {
    result.detail = actual.present() ? "is " + to_string(actual) : "is not there";
    return result;
  }
  const std::vector<double> values = testing::read(actual);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (values[i] == double(expected[i])) continue;
    result.detail = "element " + std::to_string(i) + ": want " + std::to_string(expected[i]) +
                    ", got " + std::to_string(std::int64_t(values[i]));
    return result;
  }
  result.error = 0;
  result.passed = values.size() == expected.size();
  return result;
}

testing::Comparison compare_bits(std::string_view what, const ConstTensorView& actual,
                                 const ConstTensorView& expected) {
  testing::Comparison result{std::string(what), 0, 0, false, ""};
  const auto fail = [&](std::string detail) {
    result.error = 1;
    result.detail = std::move(detail);
    return result;
  };
  if (actual.present() != expected.present()) {
    return fail(actual.present() ? "is there, and should not be" : "is not there");
  }
  if (!expected.present()) {
    result.passed = true;
    return result;
  }
  if (actual.dtype() != expected.dtype() || !std::ranges::equal(actual.shape(), expected.shape())) {
    return fail("want " + to_string(expected) + ", got " + to_string(actual));
  }
  // Row by row: dimension 0 may have any stride, the others are dense.
  const std::int64_t rows = expected.rank() > 0 ? expected.size(0) : 1;
  const std::int64_t bytes = rows > 0 ? expected.numel() / rows * size_of(expected.dtype()) : 0;
  for (std::int64_t i = 0; i < rows && bytes > 0; ++i) {
    const auto* a = static_cast<const unsigned char*>(actual.data()) +
                    i * actual.stride(0) * size_of(actual.dtype());
    const auto* b = static_cast<const unsigned char*>(expected.data()) +
                    i * expected.stride(0) * size_of(expected.dtype());
    if (std::memcmp(a, b, std::size_t(bytes)) == 0) continue;
    if (result.error++ > 0) continue;
    std::int64_t at = 0;
    while (a[at] == b[at]) ++at;
    result.detail = "first difference in row " + std::to_string(i) + ", element " +
                    std::to_string(at / size_of(expected.dtype()));
  }
  if (result.error > 0) {
    result.detail = std::to_string(std::int64_t(result.error)) + " of " + std::to_string(rows) +
                    " rows differ; " + result.detail;
  }
  result.passed = result.error == 0;
  return result;
}

void Comparisons::add(const testing::Comparison& comparison) {
  for (testing::Comparison& known : list_) {
    if (known.what != comparison.what) continue;
    if (known.passed && !comparison.passed) known = comparison;
    return;
  }
  list_.push_back(comparison);
}

void Comparisons::add(const Comparisons& others, int rank) {
  if (others.backend_) ran_on(*others.backend_);
  for (testing::Comparison comparison : others.list()) {
    if (!comparison.passed) {
      comparison.detail = "rank " + std::to_string(rank) + ": " + comparison.detail;
    }
    add(comparison);
  }
}

void Comparisons::ran_on(Backend backend) {
  if (backend_.value_or(backend) != backend) {
    add({"backend", 1, 0, false,
         std::string(to_string(*backend_)) + " and " + std::string(to_string(backend))});
  }
  backend_ = backend;
}

bool Comparisons::passed() const {
  return !list_.empty() && std::ranges::all_of(list_, [](const auto& one) { return one.passed; });
}

Comparisons compare_on_ranks(
    RankTeam& team,
    const std::function<Comparisons(int, const std::shared_ptr<Transport>&)>& body) {
  std::vector<Comparisons> of_ranks(std::size_t(team.world().world_size()));
  team.run([&](int rank, const std::shared_ptr<Transport>& transport) {
    of_ranks[std::size_t(rank)] = body(rank, transport);
  });
  Comparisons all;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) all.add(of_ranks[rank], int(rank));
  return all;
}

}  // namespace winnow::expert_parallel
