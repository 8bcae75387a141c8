// Standard output that does not lose anything silently.
#pragma once

#include <memory>
#include <streambuf>

namespace winnow::cli {

// As long as it lives, std::cout writes to standard output through it: a write that fails (a full
// disk, a closed pipe, a closed descriptor) throws winnow::Error (resource) with the system's
// reason out of the statement that wrote. The signals that would end the program at such a write,
// SIGPIPE and SIGXFSZ, are ignored. One object, made in main() before anything is opened or
// written.
class StandardOutput {
 public:
  StandardOutput();
  ~StandardOutput();
  StandardOutput(const StandardOutput&) = delete;
  StandardOutput& operator=(const StandardOutput&) = delete;

  // Writes what is still buffered and closes standard output. Throws as above.
  void finish();

 private:
  class Buffer;
  std::unique_ptr<Buffer> buffer_;
  std::streambuf* before_;
};

}  // namespace winnow::cli
