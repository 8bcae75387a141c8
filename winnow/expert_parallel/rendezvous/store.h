// The key-value store through which ranks find each other. An engine may provide its own.
#pragma once

#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

// Keys look like paths, "winnow/roster"; values are short texts. Thread-safe. All calls but get()
// should return at once, since a rank that waits for others checks its deadline between calls.
class WINNOW_EXPORT Store {
 public:
  virtual ~Store() = default;

  // Replaces the value atomically: a reader sees either the old or the new value.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until the key exists; absent if it does not exist at the deadline (Deadline::now() checks
  // once).
  virtual std::optional<std::string> get(const std::string& key, const Deadline& deadline) = 0;
  // Removes the key and every key below it ("key/..."). A store that cannot may leave
  // them: no key is used again after its removal, so that they only take space.
  virtual void remove(const std::string& key) = 0;
};

// For the threads of one process.
class WINNOW_EXPORT MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, const Deadline& deadline) override;
  void remove(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// Files in directory/JOB, one for each key, readable by this user only; all ranks can access the
// directory. Both folders are created if the parent of the directory exists, and neither is
// removed. Files of another user are refused. Errors (winnow::Error): invalid_argument without a
// job; resource.
class WINNOW_EXPORT FileStore : public Store {
 public:
  explicit FileStore(const std::filesystem::path& directory, const std::string& job = job_id());
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, const Deadline& deadline) override;
  void remove(const std::string& key) override;

 private:
  std::filesystem::path directory_;
};

}  // namespace winnow::expert_parallel
