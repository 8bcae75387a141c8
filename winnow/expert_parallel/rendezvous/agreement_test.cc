// Ranks meet in a store: who is absent, who differs, and what earlier worlds left.
#include "winnow/expert_parallel/rendezvous/agreement.h"

#include <latch>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/version.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using testing::expect_error;
using ::testing::HasSubstr;

AgreementRequest request_of(int rank, int world_size, const std::string& prefix = "test") {
  AgreementRequest request;
  request.operation = "meet";
  request.prefix = prefix;
  request.rank = rank;
  request.world_size = world_size;
  request.same = {{"hidden", "7168"}, {"topk", "8"}};
  request.own = {{"seat", std::to_string(10 * rank)}};
  return request;
}

// Until those ranks have announced themselves. Where one rank is to give up, it alone has a brief
// deadline, which begins when all that it must see is there: a busy machine changes nothing then.
void await_announced(Store& store, const std::vector<int>& ranks,
                     const std::string& prefix = "test") {
  for (const int rank : ranks) {
    store.get(prefix + "/announce/" + std::to_string(rank), generous());
  }
}

// A store of the user's own, which changes what one rank says.
class Rewriting : public Store {
 public:
  Rewriting(std::shared_ptr<Store> store, std::string from, std::string to)
      : store_(std::move(store)), from_(std::move(from)), to_(std::move(to)) {}
  void set(const std::string& key, const std::string& value) override {
    std::string changed = value;
    if (key.find("/announce/") != std::string::npos) replace_all(changed, from_, to_);
    store_->set(key, changed);
  }
  std::optional<std::string> get(const std::string& key, const Deadline& deadline) override {
    return store_->get(key, deadline);
  }
  void remove(const std::string&) override {}  // allowed to do nothing

 private:
  std::shared_ptr<Store> store_;
  std::string from_, to_;
};

TEST(Agreement, EveryRankLearnsAboutAll) {
  constexpr int kRanks = 7;
  MemoryStore store;
  std::vector<Agreement> agreements(kRanks);
  EXPECT_THAT(on_threads(kRanks,
                         [&](int rank) {
                           if (rank == 0) sleep_ms(30);
                           agreements[std::size_t(rank)] =
                               agree(store, request_of(rank, kRanks), generous());
                         }),
              Each(""));
  for (const Agreement& agreement : agreements) {
    EXPECT_EQ(agreement.id, agreements[0].id);
    ASSERT_EQ(agreement.own.size(), std::size_t(kRanks));
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(agreement.own[std::size_t(rank)], (Fields{{"seat", std::to_string(10 * rank)}}));
      EXPECT_EQ(agreement.processes[std::size_t(rank)], own_process());
    }
  }
  EXPECT_EQ(agreements[0].id.size(), 32u);
}

TEST(Agreement, OneRankIsAWorld) {
  MemoryStore store;
  EXPECT_EQ(agree(store, request_of(0, 1), generous()).own.size(), 1u);
}

TEST(Agreement, RepeatsUnderOnePrefix) {
  constexpr int kRanks = 4;
  MemoryStore store;
  EXPECT_THAT(on_threads(kRanks,
                         [&](int rank) {
                           for (int n = 0; n < 20; ++n) {
                             agree(store, request_of(rank, kRanks), generous());
                           }
                         }),
              Each(""));
}

TEST(Agreement, EveryDifferenceIsNamedOnEveryRank) {
  for (const std::string field : {"hidden", "topk"}) {
    MemoryStore store;
    const std::vector<std::string> errors = on_threads(4, [&](int rank) {
      AgreementRequest request = request_of(rank, 4);
      if (rank == 2) request.same[field == "topk"].second = "64";
      agree(store, request, generous());
    });
    EXPECT_THAT(errors, Each("meet: " + field + ": want the same on every rank, got " +
                             (field == "topk" ? "8" : "7168") + " (ranks 0, 1, 3), 64 (rank 2)"));
  }
}

TEST(Agreement, AMissingFieldIsADifference) {
  MemoryStore store;
  EXPECT_THAT(on_threads(2,
                         [&](int rank) {
                           AgreementRequest request = request_of(rank, 2);
                           if (rank == 0) request.same.pop_back();
                           agree(store, request, generous());
                         }),
              Each("meet: topk: want the same on every rank, got nothing (rank 0), 8 (rank 1)"));
}

TEST(Agreement, AnotherLibraryVersionIsNamed) {
  const auto store = std::make_shared<MemoryStore>();
  Rewriting other(store, "library version=" WINNOW_VERSION, "library version=9.9.9");
  EXPECT_THAT(on_threads(3,
                         [&](int rank) {
                           agree(rank == 1 ? static_cast<Store&>(other) : *store,
                                 request_of(rank, 3), generous());
                         }),
              Each("meet: library version: want the same on every rank, got " WINNOW_VERSION
                   " (ranks 0, 2), 9.9.9 (rank 1)"));
}

TEST(Agreement, AnotherWorldSizeIsNamedAtOnce) {
  for (const int odd : {0, 2}) {
    MemoryStore store;
    const Deadline deadline = generous();
    const std::vector<std::string> errors = on_threads(4, [&](int rank) {
      if (rank == 3) store.get("test/fault", generous());  // comes late
      agree(store, request_of(rank, rank == odd ? 3 : 4), deadline);
    });
    EXPECT_THAT(errors, Each(HasSubstr("meet: world_size: want the same on every rank, got ")));
    EXPECT_THAT(errors, Each(HasSubstr("3 (rank " + std::to_string(odd) + ")")));
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

TEST(Agreement, AbsentRanksAreNamed) {
  for (const int absent : {0, 1, 3}) {
    for (const int impatient : {0, 1, 2}) {
      if (impatient == absent) continue;
      std::vector<int> others;
      for (int rank = 0; rank < 4; ++rank) {
        if (rank != absent && rank != impatient) others.push_back(rank);
      }
      MemoryStore store;
      const std::vector<std::string> errors = on_threads(4, [&](int rank) {
        if (rank == absent) return;
        if (rank == impatient) await_announced(store, others);
        agree(store, request_of(rank, 4), rank == impatient ? brief(100) : generous());
      });
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(errors[std::size_t(rank)],
                  rank == absent
                      ? ""
                      : "meet: rank " + std::to_string(absent) + " has not arrived within 0.1 s");
      }
    }
  }
  MemoryStore store;
  EXPECT_EQ(error_of([&] { agree(store, request_of(1, 4), brief(50)); }),
            "meet: ranks 0, 2, 3 have not arrived within 0.050 s");
}

// Over a transport the prefix is fresh: the late rank need not wait for those who have left, and
// the next agreement finds all ranks again.
TEST(Agreement, ALateRankLearnsThatTheOthersHaveLeft) {
  for (const int late : {0, 2}) {
    InProcessWorld world(3);
    std::latch left(2);
    const Deadline deadline = generous();
    const std::vector<std::string> errors = on_threads(3, [&](int rank) {
      const auto transport = world.transport(rank);
      if (rank == late) left.wait();
      if (rank == 1)
        await_announced(*world.store(), {2 - late}, transport->world_id() + "/agreement0");
      const std::string error = error_of(
          [&] { agree(*transport, *world.store(), "layer", {}, rank == 1 ? brief() : deadline); });
      EXPECT_EQ(error, "layer: rank " + std::to_string(late) + " has not arrived within 0.3 s");
      if (rank != late) left.count_down();
      agree(*transport, *world.store(), "layer", {}, generous());
    });
    EXPECT_THAT(errors, Each(""));
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

// It had a transport and ended before it came here: the others need not wait for it.
TEST(Agreement, ARankThatHasLeftItsWorldIsNotWaitedFor) {
  for (const int leaver : {0, 2}) {
    InProcessWorld world(3);
    std::latch left(1);
    const Deadline deadline = generous();
    const std::vector<std::string> errors = on_threads(3, [&](int rank) {
      auto transport = world.transport(rank);
      if (rank == leaver) {
        transport.reset();
        return left.count_down();
      }
      left.wait();
      agree(*transport, *world.store(), "layer", {}, deadline);
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(errors[std::size_t(rank)],
                rank == leaver ? ""
                               : "layer: rank " + std::to_string(leaver) +
                                     " ended before all ranks had met: thread, its transport is "
                                     "closed");
    }
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

TEST(Agreement, OverATransportComparesTheFieldsOfALayer) {
  InProcessWorld world(3);
  const std::vector<std::string> errors = on_threads(3, [&](int rank) {
    const auto transport = world.transport(rank);
    for (int layer = 0; layer < 5; ++layer) {
      agree(*transport, *world.store(), "layer", {{"hidden", "64"}}, generous());
    }
    agree(*transport, *world.store(), "layer", {{"hidden", rank == 1 ? "65" : "64"}}, generous());
  });
  EXPECT_THAT(errors, Each("layer: hidden: want the same on every rank, got 64 (ranks 0, 2), 65 "
                           "(rank 1)"));
}

TEST(Agreement, LeavesLittleInTheStore) {
  const TemporaryFolder folder;
  const auto store = std::make_shared<FileStore>(folder.path());
  InProcessWorld world(3);
  EXPECT_THAT(on_threads(3,
                         [&](int rank) {
                           const auto transport = world.transport(rank);
                           for (int layer = 0; layer < 20; ++layer) {
                             agree(*transport, *store, "layer", {}, generous());
                           }
                         }),
              Each(""));
  EXPECT_LE(entries_of(folder.path()), 2);
}

TEST(Agreement, TwoCallersOfOneRankAreFoundOut) {
  MemoryStore store;
  const std::vector<std::string> errors = on_threads(2, [&](int n) {
    if (n == 0) agree(store, request_of(1, 3), generous());
    await_announced(store, {1});
    Announcement second;
    second.nonce = "another caller";
    second.process = own_process();
    second.world_size = 3;
    store.set("test/announce/1", to_text(second));
  });
  EXPECT_THAT(errors[0], HasSubstr("meet: rank: want one caller as rank 1, got two: process "));
}

TEST(Agreement, ChecksItsRank) {
  MemoryStore store;
  expect_error([&] { agree(store, request_of(3, 3), generous()); }, ErrorCode::invalid_argument,
               "meet: rank: want in [0, 3), got 3");
  expect_error([&] { agree(store, request_of(0, 0), generous()); }, ErrorCode::invalid_argument,
               "meet: world_size: want 1 or more, got 0");
}

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
  store.set("test/fault", "timeout\nof long ago\n-\nold\n");
  EXPECT_THAT(on_threads(3,
                         [&](int rank) {
                           if (rank != 0) sleep_ms(100 * rank);
                           agree(store, request_of(rank, 3), generous());
                         }),
              Each(""));
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
