#include "winnow/core/record.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/extent.h"
#include "winnow/core/version.h"
#include "winnow/core/write_errors.h"

namespace winnow {
namespace {

struct Settings {
  int log = -1;        // descriptor; -1: no log
  std::string folder;  // of records; empty: none
  std::string only;    // an operation, a family, or empty: all
  std::int64_t limit = 0;
  bool any() const { return log >= 0 || !folder.empty(); }
};

std::string in_quotes(const std::string& text) {
  return std::string("\"").append(text).append("\"");
}

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

Settings read_settings(std::string_view operation) {
  Settings settings;
  const std::string log = variable("WINNOW_LOG");
  if (log == "1" || log == "stderr") {
    settings.log = STDERR_FILENO;
  } else if (!log.empty() && log != "0") {
    settings.log = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (settings.log < 0) {
      throw Error(ErrorCode::resource, std::string(operation), "WINNOW_LOG",
                  "0, 1, stderr or a file that can be written",
                  in_quotes(log) + ": " + std::strerror(errno));
    }
  }
  settings.folder = variable("WINNOW_RECORD");
  struct stat status{};
  if (!settings.folder.empty() &&
      (stat(settings.folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
       access(settings.folder.c_str(), W_OK) != 0)) {
    throw Error(ErrorCode::invalid_argument, std::string(operation), "WINNOW_RECORD",
                "a folder that can be written", in_quotes(settings.folder));
  }
  settings.only = variable("WINNOW_RECORD_ONLY");
  const std::string limit = variable("WINNOW_RECORD_CALLS");
  char* end = nullptr;
  settings.limit = limit.empty() ? 16 : std::strtoll(limit.c_str(), &end, 10);
  if (!limit.empty() && (*end != '\0' || settings.limit < 1)) {
    throw Error(ErrorCode::invalid_argument, std::string(operation), "WINNOW_RECORD_CALLS",
                "a number from 1 on", in_quotes(limit));
  }
  return settings;
}

// Read once; a throw leaves it to be read again.
const Settings& settings(std::string_view operation) {
  static const Settings read = read_settings(operation);
  return read;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Numbers>
std::string list(const Numbers& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    if (!text.empty()) text += ",";
    text += std::to_string(number);
  }
  return text;
}

std::string seconds_in_words(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 1e-3 ? "%.1f us" : "%.3f ms",
                seconds < 1e-3 ? seconds * 1e6 : seconds * 1e3);
  return text;
}

// A file that ignores all writes after one that failed; finish() says whether one did.
class RecordFile {
 public:
  explicit RecordFile(int descriptor) : descriptor_(descriptor), failed_(descriptor < 0) {}
  ~RecordFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  void write(const char* bytes, std::int64_t count) {
    const WriteErrorsAreReturned guard;
    while (!failed_ && count > 0) {
      const ssize_t written = ::write(descriptor_, bytes, static_cast<std::size_t>(count));
      failed_ = written < 0 && errno != EINTR;
      bytes += written > 0 ? written : 0;
      count -= written > 0 ? written : 0;
    }
  }
  void write(const std::string& text) { write(text.data(), std::int64_t(text.size())); }
  // Whether everything was written. Some file systems report only here that the disk is full.
  bool finish() {
    if (descriptor_ >= 0) failed_ |= close(std::exchange(descriptor_, -1)) != 0;
    return !failed_;
  }

 private:
  int descriptor_;
  bool failed_;
};

// The number of the call among those that are recorded; -1: it is not.
std::int64_t next_number(const Settings& settings, const std::string& operation) {
  static std::atomic<std::int64_t> calls{0};
  if (settings.folder.empty() || !operation.starts_with(settings.only)) return -1;
  const std::int64_t number = calls.fetch_add(1);
  return number < settings.limit ? number : -1;
}

// Creates a new file in the folder of records. It never opens a file that exists: that may be a
// link that somebody planted, or the record of another process with the same process id, as
// happens between containers.
std::string new_file(const Settings& settings, const std::string& operation, std::int64_t number) {
  std::string name = operation;
  for (std::size_t at; (at = name.find("::")) != std::string::npos;) {
    name.erase(at, 1);
    name[at] = '.';
  }
  char text[64];
  std::snprintf(text, sizeof(text), "/%ld-%04ld-", long(getpid()), long(number));
  const std::string start = settings.folder + text + name;
  std::string path = start + ".call";
  constexpr int kAttempts = 1000;
  for (int i = 1; i < kAttempts; ++i) {
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor >= 0) {
      close(descriptor);
      return path;
    }
    if (errno != EEXIST) break;
    path = start + "-" + std::to_string(i) + ".call";
  }
  throw Error(ErrorCode::resource, operation, "WINNOW_RECORD", "a folder that can be written",
              in_quotes(settings.folder) + ": " + std::strerror(errno));
}

int open_record(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC);
}

Device device_of(const std::vector<RecordedArgument>& arguments) {
  for (const RecordedArgument& argument : arguments) {
    if (argument.tensor.present()) return argument.tensor.device();
  }
  return {};
}

void write_bytes(RecordFile& file, const ConstTensorView& view, const Extent& extent) {
  if (extent.bytes == 0) return;
  const char* first = static_cast<const char*>(view.data()) - extent.offset;
  if (view.device().type == DeviceType::cpu) {
    file.write(first, extent.bytes);
    return;
  }
  std::vector<char> copy(static_cast<std::size_t>(extent.bytes));
  copy_between(copy.data(), Device{}, first, view.device(), copy.size());
  file.write(copy.data(), extent.bytes);
}

// The contents of the workspace are not recorded: a call needs only its size.
bool has_contents(const RecordedArgument& argument) {
  return argument.is_tensor && argument.tensor.present() && argument.name != "workspace";
}

}  // namespace

std::string in_one_line(std::string_view text) {
  std::string line(text);
  for (char& c : line) c = (c >= 0 && c < ' ') || c == 0x7f ? ' ' : c;
  return line;
}

bool recording(std::string_view operation) { return settings(operation).any(); }

std::string to_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

void RecordedCall::begin() {
  const Settings& to = settings(operation_);
  if (const std::int64_t number = next_number(to, operation_); number >= 0) {
    const Device device = device_of(arguments_);
    if (device.type != DeviceType::cpu && in_capture(device, options_.stream)) {
      note_ = ", not recorded: the stream is in capture";
    } else {
      if (device.type != DeviceType::cpu) synchronize(device, options_.stream);
      file_ = new_file(to, operation_, number);
      write_arguments();
    }
  }
  start_ = now();
}

void RecordedCall::begin_without_record() { start_ = now(); }

void RecordedCall::end(Backend backend) {
  const double seconds = now() - start_;
  const std::string took = std::string(to_string(backend)) + ", " + seconds_in_words(seconds);
  if (!file_.empty()) {
    const Device device = device_of(arguments_);
    if (device.type != DeviceType::cpu) synchronize(device, options_.stream);
    write_result(std::string(to_string(backend)) + " " + to_text(seconds));
  }
  // A call on a GPU returns when its work is queued.
  log(backend == Backend::cpu ? took : took + " to queue");
}

void RecordedCall::fail(std::string_view what) noexcept {
  try {
    if (!file_.empty()) write_result(std::string("error ").append(in_one_line(what)));
    log(std::string("error: ").append(in_one_line(what)));
  } catch (const std::exception&) {  // the call's own error is the one to be told
  }
}

void RecordedCall::log(std::string_view end) const {
  const int descriptor = settings(operation_).log;
  if (descriptor < 0) return;
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  tm parts{};
  gmtime_r(&time.tv_sec, &parts);
  char stamp[80];
  std::snprintf(stamp, sizeof(stamp), "winnow %04d-%02d-%02dT%02d:%02d:%02d.%06ldZ [%ld] ",
                parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min,
                parts.tm_sec, time.tv_nsec / 1000, long(getpid()));
  std::stringstream line;
  line << stamp << operation_;
  for (const RecordedArgument& argument : arguments_) {
    if (argument.tensor.present()) {
      const ConstTensorView& view = argument.tensor;
      line << " " << argument.name << "=" << to_string(view.dtype()) << "[" << list(view.shape())
           << "]/[" << list(view.strides()) << "]";
    } else if (!argument.text.empty()) {
      line << " " << argument.name << "=" << argument.text;
    }
  }
  line << " on " << winnow::to_string(device_of(arguments_)) << ": " << end << note_;
  if (!file_.empty()) line << ", recorded in " << file_;
  const std::string text = (line << "\n", line.str());
  // One write, so that lines of processes do not mix.
  const WriteErrorsAreReturned guard;
  if (write(descriptor, text.data(), text.size()) < 0) return;  // a log that is full stops no call
}

// A record has two parts, the arguments and the result. Each is text whose last line is "data N",
// then N bytes: those of each tensor in turn, from its lowest element in memory to its highest.
void RecordedCall::write_arguments() {
  std::stringstream text;
  text << "winnow call 1\noperation " << operation_ << "\nlibrary " << WINNOW_VERSION << "\n";
  text << "backend " << (options_.backend ? to_string(*options_.backend) : "-") << "\n";
  text << "check " << (options_.check ? 1 : 0) << "\n";
  std::int64_t bytes = 0;
  for (const RecordedArgument& argument : arguments_) {
    if (!argument.is_tensor) {
      text << "value " << argument.name << " " << (argument.text.empty() ? "-" : argument.text)
           << "\n";
      continue;
    }
    text << (argument.output ? "output " : "tensor ") << argument.name;
    const ConstTensorView& view = argument.tensor;
    if (view.present()) {
      const Extent extent = extent_of(view);
      text << " " << to_string(view.dtype()) << " " << winnow::to_string(view.device()) << " ["
           << list(view.shape()) << "] [" << list(view.strides()) << "] "
           << (has_contents(argument) ? extent.bytes : 0);
      if (has_contents(argument)) bytes += extent.bytes;
    }
    text << "\n";
  }
  text << "data " << bytes << "\n";
  RecordFile file(open_record(file_));
  file.write(text.str());
  for (const RecordedArgument& argument : arguments_) {
    if (has_contents(argument)) write_bytes(file, argument.tensor, extent_of(argument.tensor));
  }
  if (file.finish()) return;
  unlink(file_.c_str());
  throw Error(ErrorCode::resource, operation_, "WINNOW_RECORD", "room for the call's tensors",
              in_quotes(std::exchange(file_, "")) + ", which could not be written");
}

void RecordedCall::write_result(std::string_view end) {
  struct stat before{};
  stat(file_.c_str(), &before);
  RecordFile file(open_record(file_));
  const bool done = !end.starts_with("error");
  std::int64_t bytes = 0;
  for (const RecordedArgument& argument : arguments_) {
    if (done && argument.output && has_contents(argument))
      bytes += extent_of(argument.tensor).bytes;
  }
  file.write("result " + std::string(end) + "\ndata " + std::to_string(bytes) + "\n");
  for (const RecordedArgument& argument : arguments_) {
    if (done && argument.output && has_contents(argument)) {
      write_bytes(file, argument.tensor, extent_of(argument.tensor));
    }
  }
  if (file.finish()) return;
  // The arguments alone still repeat the call.
  if (truncate(file_.c_str(), before.st_size) != 0) unlink(file_.c_str());
  throw Error(ErrorCode::resource, operation_, "WINNOW_RECORD", "room for the call's results",
              in_quotes(std::exchange(file_, "")) + ", which could not be written");
}

}  // namespace winnow
