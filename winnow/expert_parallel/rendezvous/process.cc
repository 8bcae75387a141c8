#include "winnow/expert_parallel/rendezvous/process.h"

#include <atomic>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <sstream>

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

std::atomic<int> g_fork_generation{0};
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { ++g_fork_generation; });

// A file of /proc, which comes in one piece. Empty where it cannot be read; errno says why.
std::string read_small_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  char buffer[1024];
  ssize_t count;
  do count = read(file, buffer, sizeof(buffer));
  while (count < 0 && errno == EINTR);
  const int error = errno;
  close(file);
  errno = error;
  std::string text(buffer, count > 0 ? static_cast<std::size_t>(count) : 0);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

struct Stat {
  bool readable = false;
  bool absent = false;  // no such process, for certain
  char state = '\0';
  std::uint64_t start_time = 0;
};

// proc(5): "pid (name) state ...", where the name may hold anything; the start time is field 22.
Stat read_stat(std::int64_t pid) {
  const std::string text = read_small_file("/proc/" + std::to_string(pid) + "/stat");
  Stat stat;
  stat.absent = text.empty() && (errno == ENOENT || errno == ESRCH);
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return stat;
  stat.readable = true;
  std::size_t position = name_end + 2;
  stat.state = text[position];
  for (int field = 3; field < 22 && position != std::string::npos; ++field) {
    position = text.find(' ', position + 1);
  }
  if (position != std::string::npos) {
    std::from_chars(text.data() + position + 1, text.data() + text.size(), stat.start_time);
  }
  return stat;
}

std::string own_pid_namespace() {
  char buffer[PATH_MAX];
  const ssize_t count = readlink("/proc/self/ns/pid", buffer, sizeof(buffer));
  return std::string(buffer, count > 0 ? static_cast<std::size_t>(count) : 0);
}

}  // namespace

ProcessIdentity own_process() {
  ProcessIdentity process;
  process.boot = read_small_file("/proc/sys/kernel/random/boot_id");
  process.pid_namespace = own_pid_namespace();
  process.pid = getpid();
  process.start_time = read_stat(process.pid).start_time;
  return process;
}

bool same_machine(const ProcessIdentity& a, const ProcessIdentity& b) {
  return a.boot.empty() || b.boot.empty() || a.boot == b.boot;
}

ProcessState state_of(const ProcessIdentity& process) {
  static const std::string boot = read_small_file("/proc/sys/kernel/random/boot_id");
  static const std::string pid_namespace = own_pid_namespace();
  if (process.boot != boot || process.pid_namespace != pid_namespace) return ProcessState::unknown;
  // Without /proc nothing is certain.
  if (process.start_time == 0) return ProcessState::unknown;
  const Stat stat = read_stat(process.pid);
  if (stat.absent) return ProcessState::gone;
  if (!stat.readable) return ProcessState::unknown;
  if (stat.start_time != process.start_time) return ProcessState::gone;
  switch (stat.state) {
    case 'Z':
    case 'X':
      return ProcessState::gone;
    case 'T':
    case 't':
      return ProcessState::stopped;
    default:
      return ProcessState::running;
  }
}

std::string describe(const ProcessIdentity& process) {
  const std::string text = "process " + std::to_string(process.pid) + ", ";
  switch (state_of(process)) {
    case ProcessState::running:
      return text + "running";
    case ProcessState::stopped:
      return text + "stopped";
    case ProcessState::gone:
      return text + "gone";
    case ProcessState::unknown:
      return text + "in another container or on another machine";
  }
  return text;
}

std::string to_text(const ProcessIdentity& process) {
  return std::to_string(process.pid) + " " + std::to_string(process.start_time) + " " +
         (process.boot.empty() ? "-" : process.boot) + " " +
         (process.pid_namespace.empty() ? "-" : process.pid_namespace);
}

ProcessIdentity process_from_text(std::string_view text, const Sender& by) {
  std::istringstream stream{std::string(text)};
  std::string pid, start_time;
  ProcessIdentity process;
  stream >> pid >> start_time >> process.boot >> process.pid_namespace;
  process.pid = untrusted_number(pid, by, "process", 1, INT32_MAX);
  process.start_time = static_cast<std::uint64_t>(
      untrusted_number(start_time, by, "start of the process", 0, INT64_MAX));
  if (!stream) refuse_untrusted(by, "process", "four words", quoted(text));
  if (process.boot == "-") process.boot.clear();
  if (process.pid_namespace == "-") process.pid_namespace.clear();
  return process;
}

int fork_generation() { return g_fork_generation.load(std::memory_order_relaxed); }

std::string random_id() {
  unsigned char bytes[16];
  // Up to 256 bytes come whole.
  if (getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) {
    throw Error(ErrorCode::resource, "expert_parallel",
                std::string("no random numbers: ") + std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace winnow::expert_parallel
