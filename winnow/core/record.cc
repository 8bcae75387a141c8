#include "winnow/core/record.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/extent.h"
#include "winnow/core/version.h"

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
    settings.log = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
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

// In the folder of records, which no other process or call names.
std::string next_file(const Settings& settings, std::string operation) {
  static std::atomic<std::int64_t> calls{0};
  if (!operation.starts_with(settings.only)) return "";
  const std::int64_t number = calls.fetch_add(1);
  if (number >= settings.limit) return "";
  for (std::size_t at; (at = operation.find("::")) != std::string::npos;) {
    operation.erase(at, 1);
    operation[at] = '.';
  }
  char text[64];
  std::snprintf(text, sizeof(text), "/%ld-%04ld-", long(getpid()), long(number));
  return settings.folder + text + operation + ".call";
}

Device device_of(const std::vector<RecordedArgument>& arguments) {
  for (const RecordedArgument& argument : arguments) {
    if (argument.tensor.present()) return argument.tensor.device();
  }
  return {};
}

void write_bytes(std::ofstream& file, const ConstTensorView& view, const Extent& extent) {
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

// What a call needs of it is its size alone.
bool has_contents(const RecordedArgument& argument) {
  return argument.is_tensor && argument.tensor.present() && argument.name != "workspace";
}

}  // namespace

bool recording(std::string_view operation) { return settings(operation).any(); }

std::string to_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

void RecordedCall::begin() {
  const Settings& to = settings(operation_);
  if (!to.folder.empty()) file_ = next_file(to, operation_);
  if (!file_.empty()) {
    const Device device = device_of(arguments_);
    if (device.type != DeviceType::cpu && in_capture(device, options_.stream)) {
      note_ = ", not recorded: the stream is in capture";
      file_.clear();
    } else {
      if (device.type != DeviceType::cpu) synchronize(device, options_.stream);
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
    std::string line(what);
    for (char& c : line) c = c == '\n' ? ' ' : c;
    if (!file_.empty()) write_result(std::string("error ").append(line));
    log(std::string("error: ").append(line));
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
  if (write(descriptor, text.data(), text.size()) < 0) return;  // a log that is full stops no call
}

// A record is text that ends with "data N", the N bytes of the tensors in their order, and the same
// again for the result. Each tensor's bytes are those from its first element in memory to its last.
void RecordedCall::write_arguments() {
  std::ofstream file(file_, std::ios::binary);
  file << "winnow call 1\noperation " << operation_ << "\nlibrary " << WINNOW_VERSION << "\n";
  file << "backend " << (options_.backend ? to_string(*options_.backend) : "-") << "\n";
  file << "check " << (options_.check ? 1 : 0) << "\n";
  std::int64_t bytes = 0;
  for (const RecordedArgument& argument : arguments_) {
    if (!argument.is_tensor) {
      file << "value " << argument.name << " " << (argument.text.empty() ? "-" : argument.text)
           << "\n";
      continue;
    }
    file << (argument.output ? "output " : "tensor ") << argument.name;
    const ConstTensorView& view = argument.tensor;
    if (view.present()) {
      const Extent extent = extent_of(view);
      file << " " << to_string(view.dtype()) << " " << winnow::to_string(view.device()) << " ["
           << list(view.shape()) << "] [" << list(view.strides()) << "] "
           << (has_contents(argument) ? extent.bytes : 0);
      if (has_contents(argument)) bytes += extent.bytes;
    }
    file << "\n";
  }
  file << "data " << bytes << "\n";
  for (const RecordedArgument& argument : arguments_) {
    if (has_contents(argument)) write_bytes(file, argument.tensor, extent_of(argument.tensor));
  }
  file.close();
  if (!file) {
    throw Error(ErrorCode::resource, operation_, "WINNOW_RECORD", "room for the call's tensors",
                in_quotes(file_) + ", which could not be written");
  }
}

void RecordedCall::write_result(std::string_view end) {
  std::ofstream file(file_, std::ios::binary | std::ios::app);
  file << "result " << end << "\n";
  const bool done = !end.starts_with("error");
  std::int64_t bytes = 0;
  for (const RecordedArgument& argument : arguments_) {
    if (done && argument.output && has_contents(argument))
      bytes += extent_of(argument.tensor).bytes;
  }
  file << "data " << bytes << "\n";
  for (const RecordedArgument& argument : arguments_) {
    if (done && argument.output && has_contents(argument)) {
      write_bytes(file, argument.tensor, extent_of(argument.tensor));
    }
  }
  file.close();
  if (!file) {
    throw Error(ErrorCode::resource, operation_, "WINNOW_RECORD", "room for the call's results",
                in_quotes(file_) + ", which could not be written");
  }
}

}  // namespace winnow
