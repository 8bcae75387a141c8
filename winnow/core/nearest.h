// What somebody may have meant who mistyped a name. Internal.
#pragma once

#include <span>
#include <string>

#include "winnow/core/export.h"

namespace winnow {

// "; did you mean WORD?" with the known word that takes the fewest insertions, deletions and
// replacements of letters to become `given`. Empty where every known word differs in more than half
// of its letters, and neither of the two begins or ends with the other.
WINNOW_EXPORT std::string suggestion(const std::string& given, std::span<const std::string> known);

// Throws Error (invalid_argument) that names the known words, and what may have been meant.
[[noreturn]] WINNOW_EXPORT void refuse_name(const std::string& operation,
                                            const std::string& argument, const std::string& given,
                                            std::span<const std::string> known);

}  // namespace winnow
