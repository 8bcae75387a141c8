// Text from outside (file names, arguments, the environment) as a terminal may show it.
#pragma once

#include <string>
#include <string_view>

namespace winnow::cli {

// The text with each byte of a control character, and each byte that is not UTF-8, written as
// "\x1b": nothing in it moves the cursor, changes colours or speaks to the terminal. Line breaks
// stay where `lines` says that the text is more than one name.
std::string printable(std::string_view text, bool lines = false);

}  // namespace winnow::cli
