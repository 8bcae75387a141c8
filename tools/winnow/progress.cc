#include "tools/winnow/progress.h"

#include <cstdlib>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

namespace winnow::cli {
namespace {

constexpr const char* kEraseLine = "\r\x1b[K";

// Of the terminal behind standard error, which may have been resized since the last call.
int terminal_columns() {
  constexpr int kUsual = 80;
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
}

}  // namespace

bool progress_wanted() {
  const char* term = std::getenv("TERM");
  const bool overwrites = term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
  return overwrites && isatty(STDERR_FILENO) != 0;
}

std::string cut_to_width(const std::string& text, int columns) {
  int begun = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool continues = (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80;
    if (!continues && ++begun > columns) return text.substr(0, i);
  }
  return text;
}

void Progress::show(const std::string& text) {
  if (!enabled_) return;
  stream_ << kEraseLine << cut_to_width(text, terminal_columns() - 1) << std::flush;
  shown_ = true;
}

void Progress::clear() {
  if (shown_) stream_ << kEraseLine << std::flush;
  shown_ = false;
}

}  // namespace winnow::cli
