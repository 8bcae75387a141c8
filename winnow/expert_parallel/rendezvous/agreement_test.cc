// Ranks meet in a store: which are absent, and which differ.
#include "winnow/expert_parallel/rendezvous/agreement.h"

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
  expect_all_return(kRanks, [&](int rank) {
    if (rank == 0) sleep_ms(30);
    agreements[std::size_t(rank)] = agree(store, request_of(rank, kRanks), generous());
  });
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

TEST(Agreement, TheSameRanksMakeOneWorldAfterTheOther) {
  constexpr int kRanks = 4;
  MemoryStore store;
  expect_all_return(kRanks, [&](int rank) {
    for (int n = 0; n < 20; ++n) {
      AgreementRequest request = request_of(rank, kRanks);
      begin_world(store, request);
      EXPECT_EQ(request.prefix, "test/" + std::to_string(n + 1));
      agree(store, request, generous());
    }
  });
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
  expect_all_return(3, [&](int rank) {
    const auto transport = world.transport(rank);
    for (int layer = 0; layer < 20; ++layer) {
      agree(*transport, *store, "layer", {}, generous());
    }
  });
  EXPECT_LE(entries_of(folder.path() / "test"), 2);
}

// A store whose looks take their time, of one rank. Counts those that begin after the deadline.
class Slow : public Store {
 public:
  Slow(Store& store, const Deadline& deadline) : store_(store), deadline_(deadline) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::optional<std::string> get(const std::string& key, const Deadline&) override {
    late += deadline_.expired();
    sleep_ms(1);
    return store_.get(key, Deadline::now());
  }
  void remove(const std::string& key) override { store_.remove(key); }

  int late = 0;

 private:
  Store& store_;
  const Deadline& deadline_;
};

// What transport.md promises: four looks for each rank, and a few beside them.
TEST(Agreement, ASlowStoreAddsFourLooksForEachRankToADeadline) {
  constexpr int kRanks = 16;
  for (const int waiting : {0, 1}) {
    for (const bool silent : {false, true}) {  // the others came, and then say nothing
      MemoryStore store;
      for (int rank = 0; silent && rank < kRanks; ++rank) {
        Announcement other;
        other.nonce = "nonce " + std::to_string(rank);
        other.process = own_process();
        other.world_size = kRanks;
        other.same = {{"library version", WINNOW_VERSION}};
        if (rank != waiting) store.set("test/announce/" + std::to_string(rank), to_text(other));
      }
      const Deadline deadline = brief(15);
      Slow slow(store, deadline);
      AgreementRequest request = request_of(waiting, kRanks);
      request.same.clear();
      const std::string error = error_of([&] { agree(slow, request, deadline); });
      EXPECT_THAT(error, HasSubstr(silent ? "arrived but did not answer" : "have not arrived"));
      EXPECT_GE(slow.late, 1);
      EXPECT_LE(slow.late, 4 * kRanks + 8) << "rank " << waiting << (silent ? ", silent" : "");
    }
  }
}

// At once, one after the other, or when the world has met already.
TEST(Agreement, TwoCallersOfOneRankAreFoundOut) {
  Announcement second;
  second.nonce = "another caller";
  second.process = own_process();
  second.world_size = 3;
  for (const bool roster : {false, true}) {
    MemoryStore store;
    const std::vector<std::string> errors = on_threads(2, [&](int n) {
      if (n == 0) agree(store, request_of(1, 3), generous());
      await_announced(store, {1});
      roster ? store.set("test/roster", to_text(Roster{"id", {second, second, second}}))
             : store.set("test/announce/1", to_text(second));
    });
    EXPECT_THAT(errors[0], HasSubstr("meet: rank: want one caller as rank 1, got two: process "));
  }
}

// A rank that cannot write what the others wait for: they learn of it at once.
TEST(Agreement, AFullStoreEndsTheMeetingOfAllAtOnce) {
  struct Crowded : MemoryStore {
    std::string full;
    void set(const std::string& key, const std::string& value) override {
      if (key == full) throw Error(ErrorCode::resource, "store", "no room for " + key);
      MemoryStore::set(key, value);
    }
  };
  for (const std::string key : {"announce/0", "roster", "go", "announce/2", "confirm/2"}) {
    const int full = key.ends_with("2") ? 2 : 0;
    Crowded store;
    store.full = "test/" + key;
    const Deadline deadline = generous();
    const std::vector<std::string> errors =
        on_threads(3, [&](int rank) { agree(store, request_of(rank, 3), deadline); });
    for (int rank = 0; rank < 3; ++rank) {
      const std::string by = rank == full ? "" : "meet: rank " + std::to_string(full) + ": ";
      EXPECT_EQ(errors[std::size_t(rank)], by + "store: no room for test/" + key);
    }
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

// Programs share a store: what stands there may be anything.
TEST(Agreement, WhatNoRankHasWrittenIsNamedOnEveryRank) {
  const std::string strange = "x\xff";
  const struct {
    std::string key, text, phase;
  } kCases[] = {
      {"announce/0", strange, "the announcement of rank 0: a line: want nonce, got \"x?\""},
      {"announce/2", strange, "the announcement of rank 2: a line: want nonce, got \"x?\""},
      {"roster", strange, "the roster: a line: want id, got \"x?\""},
      {"roster", "id y\nnonce z", "the roster: a line: want process, got \"\""},
      {"fault", strange, "the fault: code: want a number, got \"x?\""},
      {"fault", "77\n0\ntext", "the fault: code: want 0 to 4, got 77"},
      {"fault", "0\n-1\ntext", "the fault: reason: want 0 to "},
  };
  for (const auto& planted : kCases) {
    // Where it stands a rank cannot write: it is there whenever a rank looks.
    struct Planted : MemoryStore {
      std::string key, text;
      void set(const std::string& at, const std::string& value) override {
        MemoryStore::set(at, at == key ? text : value);
      }
    } store;
    store.key = "test/" + planted.key;
    store.text = planted.text;
    store.set(store.key, "");
    const Deadline deadline = generous();
    const std::vector<std::string> errors =
        on_threads(3, [&](int rank) { agree(store, request_of(rank, 3), deadline); });
    EXPECT_THAT(errors, Each(HasSubstr("meet: " + planted.phase)));
    EXPECT_THAT(errors, Each(HasSubstr("something else has written to what the ranks share")));
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  }
}

TEST(Agreement, WorldsAreCountedByNumbersAlone) {
  for (const std::string text : {"", "x\n1 2 3 4", "-5\n1 2 3 4", "0\n1 2 3 4", "1\nx",
                                 "9223372036854775807\n1 2 3 4", "99999999999999999999\n1 2 3 4"}) {
    MemoryStore store;
    store.set("test/begun/1", text);
    AgreementRequest request = request_of(1, 3);
    EXPECT_THAT(error_of([&] { begin_world(store, request); }),
                HasSubstr("meet: the worlds begun of rank 1: "))
        << text;
    EXPECT_EQ(request.prefix, "test");
  }
  MemoryStore store;
  store.set("test/begun/1", "2147483647\n1 2 3 4");
  AgreementRequest request = request_of(1, 3);
  begin_world(store, request);
  EXPECT_EQ(request.prefix, "test/2147483648");
}

TEST(Agreement, ChecksItsRank) {
  MemoryStore store;
  expect_error([&] { agree(store, request_of(3, 3), generous()); }, ErrorCode::invalid_argument,
               "meet: rank: want in [0, 3), got 3");
  expect_error([&] { agree(store, request_of(0, 0), generous()); }, ErrorCode::invalid_argument,
               "meet: world_size: want 1 to 65536, got 0");
  expect_error([&] { agree(store, request_of(0, 1 << 30), generous()); },
               ErrorCode::invalid_argument, "meet: world_size: want 1 to 65536, got 1073741824");
  AgreementRequest request = request_of(0, 1 << 30);
  expect_error([&] { begin_world(store, request); }, ErrorCode::invalid_argument,
               "meet: world_size: want 1 to 65536, got 1073741824");
}

}  // namespace
}  // namespace winnow::expert_parallel
