// Formats like printf, but returns a string.
#pragma once

#include <string>

namespace winnow::demo {

[[gnu::format(printf, 1, 2)]] std::string format_text(const char* format, ...);

}  // namespace winnow::demo
