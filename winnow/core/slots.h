// Slots of a paged cache: where each row of a call goes, page * rows of a page + offset. Internal.
#pragma once

#include <cstdint>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/host_device.h"
#include "winnow/core/read_once.h"
#include "winnow/core/tensor.h"

namespace winnow {

// A dense list of slots. A negative slot means that its row is not stored.
struct Slots {
  const void* data = nullptr;
  bool wide = false;  // i64, else i32

  Slots() = default;
  explicit Slots(const ConstTensorView& view)
      : data(view.data()), wide(view.present() && view.dtype() == DType::i64) {}

  WINNOW_HOST_DEVICE constexpr bool present() const { return data != nullptr; }
  // Reads the slot once: another thread may rewrite it during the call.
  std::int64_t operator[](std::int64_t row) const {
    return wide ? read_once(static_cast<const std::int64_t*>(data) + row)
                : read_once(static_cast<const std::int32_t*>(data) + row);
  }
};

// What the cache of a call is, and the words of its errors.
struct SlotSpace {
  std::int64_t pages, rows_of_page;
  std::string_view page_noun, row_noun;  // "blocks", "token"
};

// If the contents are to be checked (checks_contents()): checks that every slot of `view` lies
// below the cache's end and occurs once at most. Negative slots are ignored. Throws Error naming
// the rows and the slot, or one (resource) of `operation` where the memory for the comparison is
// missing.
WINNOW_EXPORT void check_slots(std::string_view operation, std::string_view argument,
                               const ConstTensorView& view, const SlotSpace& space,
                               const RunOptions& options);

}  // namespace winnow
