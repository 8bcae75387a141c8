// What somebody may have meant who mistyped a word.
#pragma once

#include <span>
#include <string>

namespace winnow::cli {

// The known word that takes the fewest insertions, deletions and replacements of letters to become
// `word`, or begins with it or is its beginning. Empty where every known word differs in more than
// half of its letters.
std::string nearest(const std::string& word, std::span<const std::string> known);

}  // namespace winnow::cli
