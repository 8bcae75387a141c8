#include "tools/winnow/demo/output_directory.h"

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "tools/winnow/demo/text_format.h"
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include "winnow/core/error.h"

namespace winnow::demo {
namespace {

namespace fs = std::filesystem;

constexpr char kWanted[] = "a directory that can be written to";

[[noreturn]] void refuse(ErrorCode code, const std::string& got) {
  throw Error(code, "demo", "--out", kWanted, got);
}

std::string described(const fs::path& path) {
  std::string text(1, '"');
  return text.append(path.string()).append(1, '"');
}

// A new file beside `path` that is gone again unless it is renamed. Its name cannot be foreseen and
// nothing that is there already is opened: a link planted in a directory that others can write to
// leads nowhere.
class NewFile {
 public:
  explicit NewFile(const fs::path& path) {
    constexpr int kAttempts = 100;
    for (int i = 0; i < kAttempts && descriptor_ < 0; ++i) {
      unsigned random[2] = {};  // the kernel's own, which every C library passes on
      if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
        error_ = errno;
        break;
      }
      path_ = path;
      path_ += format_text(".tmp%08x%08x", random[0], random[1]);
      descriptor_ =
          ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
      error_ = descriptor_ < 0 ? errno : 0;
      if (error_ != EEXIST && error_ != EINTR) break;
    }
    made_ = descriptor_ >= 0;
  }
  ~NewFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (made_) ::unlink(path_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Each returns 0 or the error number, that of the first failure once there was one.
  int write(std::string_view bytes) {
    while (error_ == 0 && !bytes.empty()) {
      const ssize_t count = ::write(descriptor_, bytes.data(), bytes.size());
      if (count >= 0) {
        bytes.remove_prefix(static_cast<std::size_t>(count));
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
    return error_;
  }
  // Closes the file and gives it the name, in place of whatever has it.
  int rename(const fs::path& path) {
    if (error_ == 0 && ::close(std::exchange(descriptor_, -1)) != 0) error_ = errno;
    if (error_ == 0 && ::rename(path_.c_str(), path.c_str()) != 0) error_ = errno;
    if (error_ == 0) made_ = false;
    return error_;
  }

 private:
  fs::path path_;
  int descriptor_ = -1;
  int error_ = 0;
  bool made_ = false;
};

}  // namespace

void prepare_output_directory(const std::string& directory) {
  if (directory.empty()) refuse(ErrorCode::invalid_argument, "\"\"");
  const fs::path path(directory);
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_directory(status)) {
    refuse(ErrorCode::invalid_argument, described(path) + ", which is a file");
  }
  fs::create_directories(path, error);
  if (error) refuse(ErrorCode::resource, described(path) + ": " + error.message());
  const int code = NewFile(path / "probe").write("");
  if (code != 0) {
    refuse(ErrorCode::resource, described(path) + ": " + std::generic_category().message(code));
  }
}

std::string write_file(const std::string& directory, const std::string& name,
                       const std::string& bytes) {
  const fs::path path = fs::path(directory) / name;
  NewFile file(path);
  file.write(bytes);
  if (const int code = file.rename(path); code != 0) {
    refuse(ErrorCode::resource, described(path) + ": " + std::generic_category().message(code));
  }
  return path.string();
}

}  // namespace winnow::demo
