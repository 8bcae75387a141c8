// Ranks meet in a store that still holds what earlier worlds and killed processes left there.

#include <cstdlib>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/version.h"
#include "winnow/expert_parallel/testing/test_agreement.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using testing::expect_error;
using ::testing::HasSubstr;

// What processes that were killed left under the prefix is not taken for the new world's, whatever
// it says.
TEST(Agreement, LeftoversOfKilledProcessesAreIgnored) {
  const TemporaryFolder folder;
  for (int round = 0; round < 3; ++round) {
    std::vector<RankProcess> killed;
    for (int rank = 0; rank < 3; ++rank) {
      killed.emplace_back([&, rank] {
        FileStore store(folder.path());
        // A rank is missing, so the others stay and wait.
        agree(store, request_of(rank, round == 0 ? 5 : 4), generous());
        return std::string();
      });
    }
    for (int rank = 0; rank < 3; ++rank) {
      FileStore(folder.path()).get("test/announce/" + std::to_string(rank), generous());
    }
    for (RankProcess& process : killed) process.signal(SIGKILL);
    for (RankProcess& process : killed) EXPECT_EQ(process.wait(), "killed by signal 9");
    EXPECT_GE(entries_of(folder.path()), 3);
    std::vector<RankProcess> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        FileStore store(folder.path());
        if (rank == 0) sleep_ms(100);  // the leftover of rank 0 is all that rank 1 sees
        return std::to_string(agree(store, request_of(rank, 2), generous()).own.size());
      });
    }
    for (RankProcess& process : ranks) EXPECT_EQ(process.wait(), "2");
  }
}

// A dead rank's announcement is no arrival. Under a fresh prefix it is a certain end besides.
TEST(Agreement, AKilledRankHasNotArrived) {
  for (const bool fresh : {false, true}) {
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
    EXPECT_THAT(
        on_threads(2,
                   [&](int rank) {
                     AgreementRequest request = request_of(rank, 3);
                     request.fresh_prefix = fresh;
                     const bool impatient = rank == 0 && !fresh;
                     if (impatient) await_announced(store, {1});
                     agree(store, request, impatient ? brief() : deadline);
                   }),
        Each(fresh ? "meet: rank 2 ended before all ranks had met: process " + pid + ", gone"
                   : "meet: rank 2 has not arrived within 0.3 s"));
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

// Rank 0 is through and begins the next agreement with the old announcement of rank 1, before rank
// 1 has seen that this one is over.
TEST(Agreement, AQuickCoordinatorDoesNotLoseTheOthers) {
  class Quick : public MemoryStore {
   public:
    std::optional<std::string> get(const std::string& key, const Deadline& deadline) override {
      const auto found = MemoryStore::get(key, deadline);
      const auto mine = MemoryStore::get("test/announce/1", Deadline::now());
      const auto confirmed = MemoryStore::get("test/confirm/1", Deadline::now());
      if (key == "test/announce/1" && mine && !confirmed) publish("first", *mine);
      if (key == "test/go" && mine && confirmed && !found) {
        set("test/go", "first");
        publish("second", *mine);
      }
      return found;
    }

   private:
    void publish(const std::string& id, const std::string& mine) {
      Announcement coordinator = announcements_from_text(mine)[0];
      coordinator.nonce = id;
      set("test/roster", "id " + id + "\n" + to_text(coordinator) + mine);
    }
  } store;
  EXPECT_EQ(agree(store, request_of(1, 2), generous()).id, "first");
}

// The same where it cannot be known that the process is gone: the new announcement replaces it.
TEST(Agreement, LeftoversOfUnknownProcessesAreReplaced) {
  MemoryStore store;
  Announcement old;
  old.nonce = "old";
  old.process.boot = "another machine";
  old.process.pid = 1;
  old.world_size = 3;
  old.same = {{"library version", WINNOW_VERSION}, {"hidden", "7168"}, {"topk", "8"}};
  Roster roster{"old id", {old, old, old}};
  store.set("test/announce/1", to_text(old));
  store.set("test/announce/2", to_text(old));
  store.set("test/confirm/1", "old idold");
  store.set("test/roster", to_text(roster));
  store.set("test/go", "old id");
  store.set("test/fault", "3\nof long ago\n-\nold\n");
  EXPECT_THAT(on_threads(3,
                         [&](int rank) {
                           if (rank != 0) sleep_ms(100 * rank);
                           agree(store, request_of(rank, 3), generous());
                         }),
              Each(""));
}

// Two jobs that nobody has named, whose ranks have met crosswise: one world is over when the others
// come. They are not those of a job that is started again, since they were there when it met.
TEST(Agreement, WhoeverWasThereWhenTheLastWorldMetIsNoneOfTheNextJob) {
  const TemporaryFolder folder;
  const auto start = [&](const std::string& after, const char* job) {
    std::vector<RankProcess> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&folder, rank, after, job] {
        if (job != nullptr) setenv("WINNOW_JOB", job, 1);
        FileStore store(folder.path());
        store.set(after + " waits " + std::to_string(rank), "");
        store.get(after, generous());
        return std::to_string(agree(store, request_of(rank, 2), generous()).own.size());
      });
    }
    for (int rank = 0; rank < 2; ++rank) {
      FileStore(folder.path()).get(after + " waits " + std::to_string(rank), generous());
    }
    return ranks;
  };
  const auto let_go = [&](const char* after) { FileStore(folder.path()).set(after, ""); };
  auto there = start("first", nullptr);
  auto named = start("second", "7");
  sleep_ms(50);  // the start of a process is known to 10 ms
  auto first = start("none", nullptr);
  const std::string callers = "meet: rank: want one caller as rank 0, got two: process " +
                              std::to_string(there[0].pid()) + ", running, and process " +
                              std::to_string(first[0].pid()) + ", gone";
  let_go("none");
  for (RankProcess& rank : first) EXPECT_EQ(rank.wait(), "2");
  let_go("first");
  for (RankProcess& rank : there) EXPECT_THAT(rank.wait(), HasSubstr(callers));
  // Ranks that are known to be of one job may come as they like, and so may those that are new.
  let_go("second");
  for (RankProcess& rank : named) EXPECT_EQ(rank.wait(), "2");
  auto again = start("none", nullptr);
  for (RankProcess& rank : again) EXPECT_EQ(rank.wait(), "2");
}

// A rank has ended, and a spare that was running all the time takes its place beside the survivor.
// It is told apart from a rank of another job by the job's name, or by a new prefix.
TEST(Agreement, ASpareTakesARanksPlaceUnderTheNameOfTheJobOrANewPrefix) {
  for (const std::string way : {"nothing", "job", "prefix"}) {
    SCOPED_TRACE(way);
    const TemporaryFolder folder;
    FileStore store(folder.path());
    const auto process = [&](int rank, bool first, bool second) {
      return RankProcess([&folder, way, rank, first, second] {
        if (way == "job") setenv("WINNOW_JOB", "7", 1);
        FileStore mine(folder.path());
        AgreementRequest request = request_of(rank, 2);
        if (first) {
          mine.get("go", generous());
          agree(mine, request, generous());
        } else {
          mine.set("spare runs", "");
        }
        if (!second) return std::string("ended");
        mine.get("again", generous());
        if (way == "prefix") request.prefix += "/second";
        return std::to_string(agree(mine, request, generous()).own.size());
      });
    };
    RankProcess spare = process(1, false, true);
    store.get("spare runs", generous());
    sleep_ms(50);  // the start of a process is known to 10 ms
    RankProcess survivor = process(0, true, true), lost = process(1, true, false);
    store.set("go", "");
    EXPECT_EQ(lost.wait(), "ended");
    store.set("again", "");
    const std::string refused = "meet: rank: want one caller as rank 1, got two: process ";
    for (RankProcess* rank : {&survivor, &spare}) {
      const std::string got = rank->wait();
      EXPECT_EQ(got.substr(0, refused.size()), way == "nothing" ? refused : "2");
    }
  }
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
  for (const char* text :
       {"", "\n", "nonce", "nonce x\nprocess y", "process 1 2 3 4\nnonce x", "id"}) {
    const std::vector<Announcement> announcements = announcements_from_text(text);
    for (const Announcement& announcement : announcements) EXPECT_EQ(announcement.process.pid, 0);
    EXPECT_TRUE(roster_from_text(text).announcements.empty());
  }
  Announcement announcement;
  announcement.nonce = "n";
  announcement.process = own_process();
  announcement.world_size = 3;
  announcement.same = {{"a", "x=y z"}, {"b", ""}};
  announcement.own = {{"c", "two\nlines"}};
  const std::vector<Announcement> read = announcements_from_text(to_text(announcement));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].process, own_process());
  EXPECT_EQ(read[0].same, announcement.same);
  EXPECT_EQ(read[0].own, (Fields{{"c", "two lines"}}));
}

TEST(Process, IsRecognised) {
  ProcessIdentity process = own_process();
  EXPECT_EQ(state_of(process), ProcessState::running);
  EXPECT_EQ(process_from_text(to_text(process)), process);
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
  process = *process_from_text(*FileStore(folder.path()).get("process", generous()));
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
