#include "tools/winnow/demo/output_directory.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

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

// No two processes use the same name.
fs::path temporary_name(const fs::path& path) {
  fs::path result = path;
  result += ".tmp" + std::to_string(::getpid());
  return result;
}

// 0, or the error number.
int write_all(const fs::path& path, const std::string& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return errno;
  int error = 0;
  if (std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size()) error = errno;
  if (std::fclose(file) != 0 && error == 0) error = errno;
  return error;
}

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
  const fs::path probe = temporary_name(path / "probe");
  const int code = write_all(probe, "");
  fs::remove(probe, error);
  if (code != 0) {
    refuse(ErrorCode::resource, described(path) + ": " + std::generic_category().message(code));
  }
}

std::string write_file(const std::string& directory, const std::string& name,
                       const std::string& bytes) {
  const fs::path path = fs::path(directory) / name;
  const fs::path temporary = temporary_name(path);
  std::error_code error(write_all(temporary, bytes), std::generic_category());
  if (!error) fs::rename(temporary, path, error);
  if (error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    refuse(ErrorCode::resource, described(path) + ": " + error.message());
  }
  return path.string();
}

}  // namespace winnow::demo
