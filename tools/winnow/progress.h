// A line for a person who waits.
#pragma once

#include <ostream>
#include <string>

namespace winnow::cli {

// Whether standard error is a terminal on which a line can be overwritten: TERM=dumb is not.
bool progress_wanted();

// The text without its end where it has more than `columns` code points.
std::string cut_to_width(const std::string& text, int columns);

// Overwrites itself and never fills the terminal's last column, so that it does not wrap; does
// nothing unless enabled.
class Progress {
 public:
  Progress(std::ostream& stream, bool enabled) : stream_(stream), enabled_(enabled) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text);
  void clear();

 private:
  std::ostream& stream_;
  bool enabled_;
  bool shown_ = false;
};

}  // namespace winnow::cli
