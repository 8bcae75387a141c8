// Who learns of a process's end, and what is left of the thread that watches.
#include "winnow/expert_parallel/rendezvous/peer_watch.h"

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {
namespace {

int threads() { return entries_of("/proc/self/task"); }

// The number of threads, once it is `count`, or after five seconds: a thread that has been joined
// stays in the list for a moment.
int threads_settled_at(int count) {
  for (int i = 0; i < 500 && threads() != count; ++i) sleep_ms(10);
  return threads();
}

// Processes that do nothing until they are told to end.
class PeerWatchTest : public ::testing::Test {
 protected:
  int start(int status = 0) {
    const std::string name = std::to_string(children_.size());
    children_.push_back(std::make_unique<RankProcess>([this, name, status]() -> std::string {
      FileStore store(folder_.path());
      store.set("process" + name, to_text(own_process()));
      store.get("end" + name, generous());
      _exit(status);
    }));
    FileStore store(folder_.path());
    processes_.push_back(process_from_text(*store.get("process" + name, generous()), {}));
    return int(children_.size()) - 1;
  }
  void end(int child) { FileStore(folder_.path()).set("end" + std::to_string(child), "now"); }

  // Who is gone, as a watch has said.
  struct Gone {
    explicit Gone(const std::vector<ProcessIdentity>& processes) : counts(processes.size()) {
      watch = watch_processes(processes, [this](int index) { ++counts[std::size_t(index)]; });
    }
    bool becomes(int index, int count = 1) const {
      const Deadline second(std::chrono::seconds(1));
      while (counts[std::size_t(index)] != count && !second.expired()) sleep_ms(1);
      return counts[std::size_t(index)] == count;
    }
    std::vector<std::atomic<int>> counts;
    PeerWatch watch;
  };

  TemporaryFolder folder_;
  std::vector<std::unique_ptr<RankProcess>> children_;
  std::vector<ProcessIdentity> processes_;
};

TEST_F(PeerWatchTest, LearnsOfEveryKindOfEndOnceAndOfNothingElse) {
  for (const int status : {0, 0, 3, 0}) start(status);
  Gone gone(processes_), second({processes_[1]});
  children_[0]->signal(SIGSTOP);
  children_[0]->await_stopped();
  children_[1]->signal(SIGKILL);
  end(2);
  EXPECT_TRUE(gone.becomes(1));
  EXPECT_TRUE(gone.becomes(2));
  EXPECT_TRUE(second.becomes(0));
  sleep_ms(250);
  EXPECT_EQ(gone.counts[0], 0) << "a stopped process has not ended";
  EXPECT_EQ(gone.counts[1], 1);
  EXPECT_EQ(gone.counts[2], 1);
  EXPECT_EQ(gone.counts[3], 0);
  children_[0]->signal(SIGKILL);  // a stopped one dies like any other
  EXPECT_TRUE(gone.becomes(0));
}

TEST_F(PeerWatchTest, AnEndBeforeTheWatchIsNotifiedAtOnce) {
  start();
  children_[0]->signal(SIGKILL);
  children_[0]->wait();
  const Gone gone(processes_);
  EXPECT_EQ(gone.counts[0], 1);
}

TEST_F(PeerWatchTest, ALetGoWatchIsNotifiedOfNothing) {
  for (int i = 0; i < 2; ++i) start();
  Gone gone(processes_), kept(processes_);
  gone.watch.reset();
  children_[0]->signal(SIGKILL);
  EXPECT_TRUE(kept.becomes(0));
  EXPECT_EQ(gone.counts[0], 0);
}

TEST_F(PeerWatchTest, HasOneThreadThatSleepsAndLeavesNothing) {
  start();
  const int threads_before = threads(), files_before = open_files();
  for (int round = 0; round < 50; ++round) {
    const Gone first(processes_), second(processes_);
    EXPECT_EQ(threads_settled_at(threads_before + 1), threads_before + 1);
  }
  {
    const Gone gone(processes_);
    const std::clock_t begin = std::clock();
    sleep_ms(500);
    EXPECT_LT(std::clock() - begin, CLOCKS_PER_SEC / 20);
  }
  EXPECT_EQ(threads_settled_at(threads_before), threads_before);
  EXPECT_EQ(open_files(), files_before);
}

// A child has neither the thread nor its parent's watches, and may have its own.
TEST_F(PeerWatchTest, GoesOnBesideAFork) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer allows no threads in the child of a process with threads";
#endif
  start();
  auto gone = std::make_unique<Gone>(processes_);
  const int files = open_files();
  RankProcess child([&]() -> std::string {
    if (threads() != 1) return "it has the parent's thread";
    if (open_files() >= files) return "it has the parent's files";
    gone.reset();
    const Gone own(processes_);
    end(0);
    return own.becomes(0) ? "heard" : "not heard";
  });
  EXPECT_EQ(child.wait(), "heard");
  EXPECT_TRUE(gone->becomes(0));
}

// Processes that are watched while the program ends, as those of an engine do all at once.
TEST_F(PeerWatchTest, DoesNotDisturbTheEndOfAProgram) {
  for (int round = 0; round < 20; ++round) start();
  RankProcess program([&]() -> std::string {
    auto* kept = new Gone(processes_);
    for (int i = 0; i < 20; ++i) end(i);
    if (kept->counts.empty()) return "";
    std::exit(0);
  });
  EXPECT_EQ(program.wait(), "");
}

// The threads of one process: a rank is gone when its transport is, and what it has left behind.
TEST(PeersOfAWorld, AreGoneWhenTheirTransportsAre) {
  InProcessWorld world(3);
  std::vector<int> gone;
  auto watcher = world.transport(0), leaver = world.transport(1), other = world.transport(2);
  auto watch = watcher->watch_peers([&](int rank) { gone.push_back(rank); });
  std::shared_ptr<void> kernels = leaver->presence();
  leaver.reset();
  EXPECT_THAT(gone, ::testing::IsEmpty());
  EXPECT_TRUE(watcher->peer_gone(1));  // for the CPU
  kernels.reset();
  EXPECT_THAT(gone, ::testing::ElementsAre(1));
  std::vector<int> late;
  const auto second = watcher->watch_peers([&](int rank) { late.push_back(rank); });
  EXPECT_THAT(late, ::testing::ElementsAre(1));
  watch.reset();
  other.reset();
  EXPECT_THAT(gone, ::testing::ElementsAre(1));
  EXPECT_THAT(late, ::testing::ElementsAre(1, 2));
}

}  // namespace
}  // namespace winnow::expert_parallel
