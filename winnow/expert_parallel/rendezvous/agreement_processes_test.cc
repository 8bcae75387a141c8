// Ranks that are processes meet in a store.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_agreement.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

TEST(Agreement, AKilledRankIsNotWaitedFor) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  RankProcess killed([&] {
    agree(store, request_of(2, 3), generous());
    return std::string();
  });
  store.get("test/announce/2", generous());
  const std::string pid = std::to_string(killed.pid());
  killed.signal(SIGKILL);
  killed.wait();
  const Deadline deadline = generous();
  EXPECT_THAT(on_threads(2, [&](int rank) { agree(store, request_of(rank, 3), deadline); }),
              Each("meet: rank 2 ended before all ranks had met: process " + pid + ", gone"));
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

// The same of rank 0, for which the others wait alone.
TEST(Agreement, AKilledCoordinatorIsNotWaitedFor) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  RankProcess killed([&] {
    agree(store, request_of(0, 3), generous());
    return std::string();
  });
  store.get("test/announce/0", generous());
  killed.signal(SIGKILL);
  killed.wait();
  const Deadline deadline = generous();
  EXPECT_THAT(error_of([&] { agree(store, request_of(1, 3), deadline); }),
              HasSubstr("meet: rank 0 ended before all ranks had met: process "));
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
}

// A process that begins worlds as a rank keeps others out of it while it lives; then a spare of the
// job may take its place.
TEST(Agreement, ARankHasOneProcessAtATime) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  const auto world = [&](int rank) {
    AgreementRequest request = request_of(rank, 2);
    begin_world(store, request);
    return request;
  };
  RankProcess first([&] {
    const AgreementRequest request = world(1);
    store.set("begun", "");
    return error_of([&] { agree(store, request, generous()); });
  });
  store.get("begun", generous());
  const std::string pid = std::to_string(first.pid());
  const std::string refused = error_of([&] { world(1); });
  EXPECT_EQ(refused, "meet: rank: want one caller as rank 1, got two: process " +
                         std::to_string(getpid()) + ", running, and process " + pid + ", running");
  EXPECT_EQ(first.wait(), refused);  // and whoever waits in its world is told
  EXPECT_EQ(error_of([&] { agree(store, world(0), generous()); }), refused);
  const std::vector<std::string> errors =
      on_threads(2, [&](int rank) { agree(store, world(rank), generous()); });
  EXPECT_THAT(errors, Each(""));
}

TEST(Agreement, AStoppedRankIsDescribed) {
  const TemporaryFolder folder;
  std::vector<RankProcess> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      FileStore store(folder.path());
      if (rank == 1) {
        // Announces itself and answers no more.
        class Stopping : public Store {
         public:
          explicit Stopping(Store& store) : store_(store) {}
          void set(const std::string& key, const std::string& value) override {
            store_.set(key, value);
            if (key == "test/announce/1") raise(SIGSTOP);
          }
          std::optional<std::string> get(const std::string& key, const Deadline& end) override {
            return store_.get(key, end);
          }
          void remove(const std::string& key) override { store_.remove(key); }

         private:
          Store& store_;
        } stopping(store);
        agree(stopping, request_of(rank, 3), generous());
      }
      if (rank == 0) {
        await_announced(store, {1, 2});
        store.get("stopped", generous());
      }
      agree(store, request_of(rank, 3), rank == 0 ? brief() : generous());
      return std::string("met");
    });
  }
  ranks[1].await_stopped();
  FileStore(folder.path()).set("stopped", "");
  const std::string text = "meet: rank 1 arrived but did not answer within 0.3 s: process " +
                           std::to_string(ranks[1].pid()) + ", stopped";
  EXPECT_EQ(ranks[0].wait(), text);
  EXPECT_EQ(ranks[2].wait(), text);
  ranks[1].signal(SIGCONT);
  EXPECT_EQ(ranks[1].wait(), text);  // told by the others
}

TEST(Agreement, TextsOfOtherMakesAreNoAnnouncements) {
  constexpr Sender kBy{"meet", "the announcement", 1};
  const std::string good = "nonce x\nprocess 1 2 3 4\nworld_size 3\nsame a=b\nown c=d\n";
  EXPECT_EQ(announcement_from_text(good, kBy).process.pid, 1);
  EXPECT_EQ(roster_from_text("id y\n" + good + good, kBy).announcements.size(), 2u);
  for (const std::string& text :
       {std::string(), std::string("\n"), std::string("nonce"), std::string("nonce x\nprocess y"),
        std::string("process 1 2 3 4\nnonce x"), "nonce x\nprocess 1 2 3\nworld_size 3\n" + good,
        std::string("nonce x\nprocess 0 2 3 4\nworld_size 3"),
        std::string("nonce x\nprocess 1 99999999999999999999 3 4\nworld_size 3"),
        std::string("nonce x\nprocess 1 2 3 4\nworld_size 99999999999"), good + good, good + "more",
        good + "same late=1"}) {
    const std::string error = error_of([&] { announcement_from_text(text, kBy); });
    EXPECT_THAT(error, HasSubstr("meet: the announcement of rank 1: ")) << text;
    EXPECT_THAT(error, HasSubstr("something else has written to what the ranks share")) << text;
    if (text == good + good) continue;  // those of two ranks
    EXPECT_NE(error_of([&] { roster_from_text("id y\n" + text + "x", kBy); }), "") << text;
  }
  EXPECT_NE(error_of([&] { roster_from_text("", kBy); }), "");
  EXPECT_TRUE(roster_from_text("id", kBy).announcements.empty());
  Announcement announcement;
  announcement.nonce = "n";
  announcement.process = own_process();
  announcement.world_size = 3;
  announcement.same = {{"a", "x=y z"}, {"b", ""}};
  announcement.own = {{"c", "two\nlines"}};
  const Announcement read = announcement_from_text(to_text(announcement), kBy);
  EXPECT_EQ(read.process, own_process());
  EXPECT_EQ(read.same, announcement.same);
  EXPECT_EQ(read.own, (Fields{{"c", "two lines"}}));
}

TEST(Process, IsRecognised) {
  ProcessIdentity process = own_process();
  EXPECT_EQ(state_of(process), ProcessState::running);
  EXPECT_EQ(process_from_text(to_text(process), {}), process);
  process.start_time += 1;  // the number was given to another process
  EXPECT_EQ(state_of(process), ProcessState::gone);
  process = own_process();
  process.pid_namespace = "pid:[1]";
  EXPECT_EQ(state_of(process), ProcessState::unknown);

  const TemporaryFolder folder;
  RankProcess child([&] {
    FileStore(folder.path()).set("process", to_text(own_process()));
    sleep_ms(60'000);
    return std::string();
  });
  process = process_from_text(*FileStore(folder.path()).get("process", generous()), {});
  EXPECT_EQ(process.pid, child.pid());
  EXPECT_EQ(state_of(process), ProcessState::running);
  const auto becomes = [&](ProcessState state) {
    const Deadline deadline = generous();
    while (state_of(process) != state && !deadline.expired()) sleep_ms(1);
    return state_of(process) == state;
  };
  child.signal(SIGSTOP);
  EXPECT_TRUE(becomes(ProcessState::stopped));
  EXPECT_EQ(describe(process), "process " + std::to_string(child.pid()) + ", stopped");
  child.signal(SIGKILL);
  EXPECT_TRUE(becomes(ProcessState::gone));  // not waited for yet
  child.wait();
  EXPECT_EQ(state_of(process), ProcessState::gone);
}

}  // namespace
}  // namespace winnow::expert_parallel
