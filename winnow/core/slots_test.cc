#include "winnow/core/slots.h"

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/interrupt.h"
#include "winnow/core/tensor.h"

namespace winnow {
namespace {

struct Interrupt : std::runtime_error {
  Interrupt() : std::runtime_error("interrupted here") {}
};

// Slots that descend are sorted in order to be compared, which takes seconds.
TEST(Slots, AnInterruptEndsTheirComparison) {
  constexpr std::int64_t kSlots = std::int64_t{1} << 24;
  Tensor slots(DType::i32, {kSlots});
  const auto values = slots.values<std::int32_t>();
  std::iota(values.rbegin(), values.rend(), 0);
  set_interrupt_hook([] { throw Interrupt(); });
  EXPECT_THROW(check_slots("here", "slots", slots, {kSlots, 1, "pages", "row"}, {}), Interrupt);
  set_interrupt_hook(nullptr);
}

}  // namespace
}  // namespace winnow
