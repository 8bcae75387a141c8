#include "winnow/expert_parallel/rendezvous/store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/core/write_errors.h"
#include "winnow/expert_parallel/rendezvous/process.h"

namespace winnow::expert_parallel {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFileStore = "expert_parallel::FileStore";

[[noreturn]] void fail(const std::string& did, const fs::path& path, int error) {
  throw Error(ErrorCode::resource, kFileStore,
              "cannot " + did + " " + path.string() + ": " + std::strerror(error));
}

// One file name for a key: letters, digits, "._-" as they are, everything else as %XX. No name
// begins with a dot.
std::string file_name(const char* argument, const std::string& key) {
  std::string name;
  for (const char letter : key) {
    const bool plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                       (letter >= '0' && letter <= '9') || letter == '_' || letter == '-' ||
                       (letter == '.' && !name.empty());
    if (plain) {
      name += letter;
    } else {
      constexpr char kDigits[] = "0123456789ABCDEF";
      const auto byte = static_cast<unsigned char>(letter);
      name += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  if (name.empty() || name.size() > 200) {
    throw Error(ErrorCode::invalid_argument, kFileStore, argument, "1 to 200 bytes as a file name",
                "\"" + key + "\"");
  }
  return name;
}

// "a%2F" is what every key below "a" begins with.
constexpr const char* kBelow = "%2F";
constexpr int kMostAttempts = 100;

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

std::optional<std::string> read_file(const fs::path& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.is_open()) {
    if (errno == ENOENT) return std::nullopt;
    fail("open", path, errno);
  }
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail("look at", path, errno);
  if (status.st_uid != geteuid() || !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::resource, kFileStore,
                path.string() + " is not a file of this user: another one shares the directory");
  }
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t count = read(file.get(), buffer, sizeof(buffer));
    if (count == 0) return text;
    if (count > 0) {
      text.append(buffer, static_cast<std::size_t>(count));
    } else if (errno != EINTR) {
      fail("read", path, errno);
    }
  }
}

void write_file(const fs::path& path, const std::string& text) {
  const WriteErrorsAreReturned fails;
  const File file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.is_open()) fail("write", path, errno);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = write(file.get(), text.data() + done, text.size() - done);
    if (count >= 0) {
      done += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      const int error = errno;
      unlink(path.c_str());
      fail("write", path, error);
    }
  }
}

bool is_key_or_below(const std::string& key, const std::string& ancestor) {
  return key.starts_with(ancestor) &&
         (key.size() == ancestor.size() || key[ancestor.size()] == '/');
}

}  // namespace

// Between looks for an interrupt.
constexpr std::chrono::milliseconds kLook{50};

void MemoryStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::optional<std::string> MemoryStore::get(const std::string& key, const Deadline& deadline) {
  Interrupts interrupts;
  std::unique_lock lock(mutex_);
  const auto there = [&] { return values_.contains(key); };
  while (!there()) {
    if (deadline.expired()) return std::nullopt;
    changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kLook, deadline.remaining()), there);
    lock.unlock();  // what is called may use the store
    interrupts.look();
    lock.lock();
  }
  return values_.at(key);
}

void MemoryStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  std::erase_if(values_, [&](const auto& entry) { return is_key_or_below(entry.first, key); });
}

FileStore::FileStore(const fs::path& directory, const std::string& job) {
  if (directory.empty()) {
    throw Error(ErrorCode::invalid_argument, kFileStore, "directory", "a directory", "\"\"");
  }
  if (job.empty()) {
    throw Error(ErrorCode::invalid_argument, kFileStore, "job",
                "a name that no other job has, in WINNOW_JOB or from torchrun --rdzv-id, mpirun or "
                "srun",
                "none");
  }
  directory_ = directory / file_name("job", job);
  for (const fs::path& made : {directory, directory_}) {
    if (mkdir(made.c_str(), 0700) != 0 && errno != EEXIST) fail("make", made, errno);
    std::error_code error;
    if (!fs::is_directory(made, error)) fail("use", made, error ? error.value() : ENOTDIR);
  }
}

void FileStore::set(const std::string& key, const std::string& value) {
  // Processes in containers of their own may share a number.
  static std::atomic<std::uint64_t> counter{0};
  static const std::string own = random_id();
  const std::string name = file_name("key", key);
  // The temporary file counts as a key below this one, so that remove() finds what a killed rank
  // left. Where another rank's remove() takes it away in the middle, it is written again.
  const fs::path target = directory_ / name;
  for (int attempt = 1;; ++attempt) {
    const fs::path temporary = directory_ / (name + kBelow + own + "." + std::to_string(getpid()) +
                                             "." + std::to_string(++counter));
    write_file(temporary, value);
    if (rename(temporary.c_str(), target.c_str()) == 0) return;
    const int error = errno;
    unlink(temporary.c_str());
    if (error != ENOENT || attempt == kMostAttempts) fail("write", target, error);
  }
}

std::optional<std::string> FileStore::get(const std::string& key, const Deadline& deadline) {
  const fs::path path = directory_ / file_name("key", key);
  std::chrono::nanoseconds pause = std::chrono::microseconds(200);
  for (Interrupts interrupts;; interrupts.look()) {
    const bool last = deadline.expired();
    if (std::optional<std::string> text = read_file(path)) return text;
    if (last) return std::nullopt;
    std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
    pause = std::min<std::chrono::nanoseconds>(2 * pause, std::chrono::milliseconds(5));
  }
}

void FileStore::remove(const std::string& key) {
  const std::string name = file_name("key", key);
  std::error_code error;
  for (fs::directory_iterator entry(directory_, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string other = entry->path().filename().string();
    if (other == name || other.starts_with(name + kBelow)) unlink(entry->path().c_str());
  }
  // A directory that is gone holds no key.
  if (error && error != std::errc::no_such_file_or_directory) {
    fail("list", directory_, error.value());
  }
}

}  // namespace winnow::expert_parallel
