// Random contents for tensors: the same numbers on every platform for the same seed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "winnow/core/tensor.h"

namespace winnow::testing {

// SplitMix64 (Steele, Lea and Flood 2014). It uses only integer arithmetic and exact conversions,
// so the numbers do not depend on a platform's math library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next();
  // In [0, 1).
  double uniform();
  // Mean 0, variance 1, between -4.9 and 4.9: the sum of eight uniform numbers.
  double normal();
  // In [0, count), for counts from 1 to 2^32.
  std::int64_t below(std::int64_t count);

 private:
  std::uint64_t state_;
};

// Permutes the list; all permutations are equally likely.
template <class T>
void shuffle(std::span<T> list, Random& random) {
  for (std::size_t i = list.size(); i > 1; --i) {
    std::swap(list[i - 1], list[static_cast<std::size_t>(random.below(std::int64_t(i)))]);
  }
}

// The FNV-1a hash of a name, as a seed: cases of different names get different numbers.
std::uint64_t seed_from(std::string_view name);

// These fill a host tensor of any float dtype and strides, rounding every value to the dtype once.
void fill_normal(const TensorView& view, Random& random, double deviation = 1);
// Fast, for gigabytes: copies each row from a random place of one block of 2^20 normal numbers. The
// last dimension must be contiguous.
void fill_normal_rows(const TensorView& view, Random& random);
void fill_uniform(const TensorView& view, Random& random, double low, double high);
void fill(const TensorView& view, double value);
// With these values, as many as there are elements, in the order of a dense tensor.
void fill(const TensorView& view, std::span<const double> values);

// Sets all bits, which is a NaN in every float dtype, to mark elements that nothing has written.
void fill_unwritten(const TensorView& view);
// The number of elements that still have these bits.
std::int64_t count_unwritten(const ConstTensorView& view);

// Fills every row (last dimension) of an i32 tensor with distinct numbers in [0, count), in random
// order. Throws Error if a row is longer than `count`.
void fill_distinct(const TensorView& view, Random& random, std::int64_t count);
// [count], i32 or i64: distinct slots in [0, slots), in random or ascending order. With `skipped`
// every third one is negative instead (-1 or -2), so that its row is not stored.
Tensor make_slots(DType dtype, std::int64_t count, std::int64_t slots, bool skipped, Random& random,
                  bool ascending = false);
// Fills an i32 tensor with independent numbers in [0, count), so numbers may repeat.
void fill_below(const TensorView& view, Random& random, std::int64_t count);

}  // namespace winnow::testing
