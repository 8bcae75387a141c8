#include "winnow/core/slots.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/interrupt.h"
#include "winnow/core/on_host.h"
#include "winnow/core/route.h"

namespace winnow {
namespace {

void check_distinct(const Check& check, std::string_view argument, const Slots& slots,
                    std::int64_t count, std::string_view noun, Interrupts& interrupts) {
  std::vector<std::pair<std::int64_t, std::int64_t>> written;  // slot, row
  written.reserve(static_cast<std::size_t>(count));
  for (std::int64_t row = 0; row < count; ++row) {
    const std::int64_t slot = slots[row];
    if (slot >= 0) written.emplace_back(slot, row);
  }
  std::sort(written.begin(), written.end(), [&](const auto& a, const auto& b) {
    interrupts.step();
    return a < b;
  });
  const auto twice =
      std::adjacent_find(written.begin(), written.end(),
                         [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == written.end()) return;
  const std::string named = " for " + std::string(noun) + " ";
  check.that(false, argument, "each slot at most once",
             "slot " + std::to_string(twice->first) + named + std::to_string(twice->second) +
                 " and " + std::string(noun) + " " + std::to_string((twice + 1)->second));
}

}  // namespace

void check_slots(std::string_view operation, std::string_view argument, const ConstTensorView& view,
                 const SlotSpace& space, const RunOptions& options) {
  if (!checks_contents(operation, view.device(), options)) return;
  const Check check(operation);
  const std::int64_t count = view.numel();
  const OnHost<char> values(static_cast<const char*>(view.data()), count * size_of(view.dtype()),
                            view.device(), options.stream);
  Slots slots(view);
  slots.data = values.data();
  bool ascending = true;  // as in a prompt's slots: needs no sorting to be seen distinct
  std::int64_t last = -1;
  Interrupts interrupts;
  for (std::int64_t row = 0; row < count; ++row) {
    interrupts.step();
    const std::int64_t slot = slots[row];
    if (slot < 0) continue;
    if (slot / space.rows_of_page >= space.pages) {
      check.that(false, argument,
                 "slots below " + std::to_string(space.pages) + " " + std::string(space.page_noun) +
                     " * " + std::to_string(space.rows_of_page) + " slots",
                 "slot " + std::to_string(slot) + " for " + std::string(space.row_noun) + " " +
                     std::to_string(row));
    }
    ascending = ascending && slot > last;
    last = slot;
  }
  if (ascending) return;
  try {
    check_distinct(check, argument, slots, count, space.row_noun, interrupts);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, std::string(operation),
                "out of memory for the comparison of the slots");
  }
}

}  // namespace winnow
