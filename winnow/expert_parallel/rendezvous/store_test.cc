// The stores in which ranks meet.
#include "winnow/expert_parallel/rendezvous/store.h"

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class StoreTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) {
      store_ = std::make_unique<FileStore>(folder_.path());
    } else {
      store_ = std::make_unique<MemoryStore>();
    }
  }
  std::optional<std::string> look(const std::string& key) {
    return store_->get(key, Deadline::now());
  }
  TemporaryFolder folder_;
  std::unique_ptr<Store> store_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "File" : "Memory"; });

TEST_P(StoreTest, KeepsAndReplacesValues) {
  EXPECT_EQ(look("a"), std::nullopt);
  store_->set("a", "one");
  store_->set("b", "");
  EXPECT_EQ(look("a"), "one");
  EXPECT_EQ(look("b"), "");
  const std::string long_value(100'000, 'x');
  store_->set("a", long_value);
  EXPECT_EQ(look("a"), long_value);
}

TEST_P(StoreTest, KeysMayHoldAnything) {
  for (const std::string key : {"a/b", "a%2Fb", "a b", ".hidden", "..", "a\nb", "\xc3\xa4"}) {
    store_->set(key, "value of " + key);
  }
  for (const std::string key : {"a/b", "a%2Fb", "a b", ".hidden", "..", "a\nb", "\xc3\xa4"}) {
    EXPECT_EQ(look(key), "value of " + key);
  }
}

TEST_P(StoreTest, GetWaitsForTheKey) {
  std::thread writer([&] {
    sleep_ms(50);
    store_->set("late", "value");
  });
  EXPECT_EQ(store_->get("late", generous()), "value");
  writer.join();
}

TEST_P(StoreTest, GetGivesUpAtTheDeadline) {
  const Deadline deadline = brief(60);
  EXPECT_EQ(store_->get("never", deadline), std::nullopt);
  EXPECT_TRUE(deadline.expired());
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(30));
}

TEST_P(StoreTest, RemoveTakesTheKeyAndAllBelowIt) {
  for (const char* key : {"w/1", "w/1/x", "w/1/x/y", "w/10", "w/1x", "w", "other"}) {
    store_->set(key, key);
  }
  store_->remove("w/1");
  for (const char* key : {"w/1", "w/1/x", "w/1/x/y"}) EXPECT_EQ(look(key), std::nullopt) << key;
  for (const char* key : {"w/10", "w/1x", "w", "other"}) EXPECT_EQ(look(key), key);
  store_->remove("w");
  for (const char* key : {"w/10", "w/1x", "w"}) EXPECT_EQ(look(key), std::nullopt) << key;
  store_->remove("not there");
  EXPECT_EQ(look("other"), "other");
}

TEST_P(StoreTest, ReadersSeeWholeValuesOnly) {
  const std::string a(20'000, 'a'), b(30'000, 'b');
  store_->set("key", a);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int n = 0; n < 300; ++n) store_->set("key", n % 2 == 0 ? b : a);
    stop = true;
  });
  int reads = 0;
  while (!stop || reads == 0) {
    const auto value = look("key");
    ++reads;
    if (value != a && value != b) {
      ADD_FAILURE() << "a value of " << (value ? value->size() : 0) << " bytes";
      break;
    }
  }
  writer.join();
}

TEST(FileStore, IsPrivate) {
  const TemporaryFolder folder;
  const fs::path made = folder.path() / "rendezvous";
  FileStore store(made);
  store.set("key", "value");
  struct stat status{};
  for (const fs::path& directory : {made, made / "test"}) {
    ASSERT_EQ(stat(directory.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u);
  }
  ASSERT_EQ(stat((made / "test" / "key").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(entries_of(made / "test"), 1);  // no temporary file is left
}

TEST(FileStore, SaysWhatIsWrongWithTheDirectory) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "file") << "text";
  testing::expect_error([&] { FileStore store(folder.path() / "file"); }, ErrorCode::resource,
                        "expert_parallel::FileStore: cannot use " +
                            (folder.path() / "file").string() + ": Not a directory");
  testing::expect_error(
      [&] { FileStore store(folder.path() / "no" / "where"); }, ErrorCode::resource,
      "expert_parallel::FileStore: cannot make " + (folder.path() / "no" / "where").string() +
          ": No such file or directory");
  testing::expect_error([&] { FileStore store(""); }, ErrorCode::invalid_argument,
                        "expert_parallel::FileStore: directory: want a directory, got \"\"");
  FileStore store(folder.path());
  testing::expect_error([&] { store.set("", "value"); }, ErrorCode::invalid_argument,
                        "expert_parallel::FileStore: key: want 1 to 200 bytes as a file name, got "
                        "\"\"");
  EXPECT_THROW(store.set(std::string(201, 'k'), "value"), Error);
}

TEST(FileStore, BelongsToAJob) {
  const TemporaryFolder folder;
  FileStore one(folder.path(), "../one"), two(folder.path(), "two");
  one.set("key", "value");
  EXPECT_EQ(two.get("key", Deadline::now()), std::nullopt);
  EXPECT_EQ(FileStore(folder.path(), "../one").get("key", Deadline::now()), "value");
  EXPECT_EQ(entries_of(folder.path()), 2);
  testing::expect_error([&] { FileStore store(folder.path(), ""); }, ErrorCode::invalid_argument,
                        "expert_parallel::FileStore: job: want a name that no other job has, in "
                        "WINNOW_JOB or from torchrun --rdzv-id, mpirun or srun, got none");
}

TEST(FileStore, RefusesWhatAnotherUserPlanted) {
  const TemporaryFolder parent;
  FileStore store(parent.path());
  const fs::path folder = parent.path() / "test";
  std::ofstream(folder / "target") << "text";
  fs::create_symlink(folder / "target", folder / "link");
  EXPECT_THAT(error_of([&] { store.get("link", Deadline::now()); }), HasSubstr("cannot open"));
  // A write replaces the link and leaves its target alone.
  store.set("link", "value");
  EXPECT_EQ(store.get("link", Deadline::now()), "value");
  EXPECT_EQ(store.get("target", Deadline::now()), "text");

  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(chown((folder / "target").c_str(), 12345, 12345), 0);
  EXPECT_THAT(error_of([&] { store.get("target", Deadline::now()); }),
              HasSubstr("not a file of this user"));
}

TEST(FileStore, RemoveFindsWhatAKilledWriterLeft) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  std::ofstream(folder.path() / "test" / "w%2F1%2F4711.5") << "half a val";
  store.remove("w/1");
  EXPECT_EQ(entries_of(folder.path() / "test"), 0);
}

// `ulimit -f`: an error, and neither a signal nor half a file.
TEST(FileStore, ALimitOfFileSizesIsAnError) {
  const TemporaryFolder folder;
  RankProcess process([&] {
    const rlimit limit{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    FileStore store(folder.path());
    store.set("small", "fits");
    const std::string error = error_of([&] { store.set("large", std::string(5000, 'x')); });
    return error + "; " + store.get("small", Deadline::now()).value_or("lost");
  });
  EXPECT_THAT(process.wait(),
              ::testing::MatchesRegex("expert_parallel::FileStore: cannot write .*large.*"
                                      ": File too large; fits"));
  FileStore store(folder.path());
  EXPECT_EQ(store.get("large", Deadline::now()), std::nullopt);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() / "test"), {}), 1);
}

}  // namespace
}  // namespace winnow::expert_parallel
