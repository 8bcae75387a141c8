// Random contents for tensors: the same numbers on every platform for the same seed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "winnow/core/tensor.h"

namespace winnow::testing {

// Numbers made by mixing a counter (SplitMix64; Steele, Lea and Flood 2014). Only integer
// arithmetic and exact conversions, so that no platform's math library has a say.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next();
  // At least 0 and below 1.
  double uniform();
  // Mean 0, variance 1, between -4.9 and 4.9: the sum of eight uniform numbers.
  double normal();
  // From 0 to count - 1, for counts of 1 to 2^32.
  std::int64_t below(std::int64_t count);

 private:
  std::uint64_t state_;
};

// Any order of the list, all equally likely.
template <class T>
void shuffle(std::span<T> list, Random& random) {
  for (std::size_t i = list.size(); i > 1; --i) {
    std::swap(list[i - 1], list[static_cast<std::size_t>(random.below(std::int64_t(i)))]);
  }
}

// A seed from a name (FNV-1a), so that every case has numbers of its own.
std::uint64_t seed_from(std::string_view name);

// Each fills every element of a tensor on the host, of any float dtype and with any strides, and
// rounds to the dtype once.
void fill_normal(const TensorView& view, Random& random, double deviation = 1);
// Rows cut out of one block of normal numbers at random places: for gigabytes.
void fill_normal_rows(const TensorView& view, Random& random);
void fill_uniform(const TensorView& view, Random& random, double low, double high);
void fill(const TensorView& view, double value);

// The memory of a tensor as a program that has written nothing might leave it: all bits set, which
// is a NaN in every float dtype. is_unwritten() tells whether an element still has these bits.
void fill_unwritten(const TensorView& view);
std::int64_t count_unwritten(const ConstTensorView& view);

// Every row (last dimension) of an i32 tensor gets distinct numbers from 0 to count - 1 in random
// order. Errors (winnow::Error): rows longer than `count`.
void fill_distinct(const TensorView& view, Random& random, std::int64_t count);
// The slots of a cache that `count` rows go to: distinct ones in random order, or ascending; where
// `skipped`, every third is negative, which may come again. i32 or i64.
Tensor make_slots(DType dtype, std::int64_t count, std::int64_t slots, bool skipped, Random& random,
                  bool ascending = false);
// Independent numbers from 0 to count - 1, so that repeats occur.
void fill_below(const TensorView& view, Random& random, std::int64_t count);

}  // namespace winnow::testing
