#include "tools/winnow/standard_output.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>

#include <fcntl.h>
#include <unistd.h>

#include "winnow/core/error.h"

namespace winnow::cli {
namespace {

[[noreturn]] void fail(int error) {
  throw Error(ErrorCode::resource, "standard output",
              std::string("the output is incomplete: ") + std::strerror(error));
}

// A closed standard descriptor would be given to the next file that is opened, and what is printed
// would go there. /dev/null takes its place, opened so that using it fails as before.
void occupy_closed_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    const int opened = open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    if (opened >= 0 && opened != descriptor) close(opened);
  }
}

}  // namespace

class StandardOutput::Buffer : public std::streambuf {
 public:
  Buffer() : by_line_(isatty(STDOUT_FILENO) != 0) { discard(); }

 protected:
  int_type overflow(int_type letter) override {
    write_all();
    if (traits_type::eq_int_type(letter, traits_type::eof())) return traits_type::not_eof(letter);
    return sputc(traits_type::to_char_type(letter));
  }
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    const std::streamsize result = std::streambuf::xsputn(text, size);
    if (by_line_ && std::memchr(text, '\n', static_cast<std::size_t>(size)) != nullptr) write_all();
    return result;
  }
  int sync() override {
    write_all();
    return 0;
  }

 private:
  void discard() { setp(bytes_.data(), bytes_.data() + bytes_.size()); }

  // What cannot be written is dropped: the next attempt would fail too.
  void write_all() {
    const char* next = pbase();
    const char* const end = pptr();
    discard();
    while (next != end) {
      const ssize_t count = ::write(STDOUT_FILENO, next, static_cast<std::size_t>(end - next));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(errno);
      next += count;
    }
  }

  bool by_line_;  // a person reads it
  std::array<char, 1 << 14> bytes_;
};

StandardOutput::StandardOutput() {
  occupy_closed_descriptors();
  for (const int number : {SIGPIPE, SIGXFSZ}) signal(number, SIG_IGN);
  buffer_ = std::make_unique<Buffer>();
  before_ = std::cout.rdbuf(buffer_.get());
  std::cout.exceptions(std::ios::badbit);  // lets the buffer's own exception through
  std::cerr.tie(nullptr);                  // a message about lost output must not write output
}

StandardOutput::~StandardOutput() {
  std::cout.exceptions(std::ios::goodbit);
  std::cout.rdbuf(before_);
}

void StandardOutput::finish() {
  buffer_->pubsync();
  // Some file systems report only here that the disk is full.
  if (close(STDOUT_FILENO) != 0 && errno != EINTR) fail(errno);
}

}  // namespace winnow::cli
