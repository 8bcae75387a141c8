// A line for a person who waits.
#pragma once

#include <ostream>
#include <string>

namespace winnow::cli {

// Overwrites itself; does nothing unless enabled.
class Progress {
 public:
  Progress(std::ostream& stream, bool enabled) : stream_(stream), enabled_(enabled) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text) {
    if (!enabled_) return;
    stream_ << "\r\x1b[K" << text << std::flush;
    shown_ = true;
  }
  void clear() {
    if (shown_) stream_ << "\r\x1b[K" << std::flush;
    shown_ = false;
  }

 private:
  std::ostream& stream_;
  bool enabled_;
  bool shown_ = false;
};

}  // namespace winnow::cli
