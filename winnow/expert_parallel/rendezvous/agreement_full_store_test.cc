// A rank that cannot write what the others wait for: they learn of it at once.
#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/test_agreement.h"

namespace winnow::expert_parallel {
namespace {

constexpr int kRanks = 3;

// The store of one rank, which has no room for a key, and from then on for no value if `full`.
class Crowded : public Store {
 public:
  Crowded(Store& store, std::string key, bool full)
      : store_(store), key_(std::move(key)), full_(full) {}
  void set(const std::string& key, const std::string& value) override {
    if (key == key_) crowded_ = true;
    if (key == key_ || (crowded_ && full_ && !value.empty())) {
      throw Error(ErrorCode::resource, "store", "no room for " + key);
    }
    store_.set(key, value);
  }
  std::optional<std::string> get(const std::string& key, const Deadline& deadline) override {
    return store_.get(key, deadline);
  }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  Store& store_;
  const std::string key_;
  const bool full_;
  bool crowded_ = false;
};

struct Place {
  int rank = 0;
  std::string key;
  bool full = false;
};

class FullStore : public ::testing::TestWithParam<Place> {};

TEST_P(FullStore, EndsTheMeetingOfAllAtOnce) {
  const Place& place = GetParam();
  const TemporaryFolder folder;
  FileStore store(folder.path());
  const Deadline deadline = generous();
  const std::vector<std::string> errors = on_threads(kRanks, [&](int rank) {
    const AgreementRequest request = request_of(rank, kRanks);
    if (rank != place.rank) {
      agree(store, request, deadline);
      return;
    }
    std::vector<int> others;
    for (int other = 0; other < kRanks; ++other) {
      if (other != rank) others.push_back(other);
    }
    await_announced(store, others);  // who comes later is not told
    Crowded crowded(store, place.key, place.full);
    agree(crowded, request, deadline);
  });
  const std::string by = "rank " + std::to_string(place.rank), why = "store: no room for ";
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(errors[std::size_t(rank)],
              rank == place.rank ? why + place.key
              : place.full       ? "meet: " + by + " gave up and could not write why to the store"
                                 : "meet: " + by + ": " + why + place.key);
  }
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20));
  // The next one is disturbed by nothing that this one has left.
  EXPECT_THAT(
      on_threads(kRanks, [&](int rank) { agree(store, request_of(rank, kRanks), generous()); }),
      ::testing::Each(""));
  store.remove("test/world");
  store.remove("test/roster");
  store.remove("test/go");
  EXPECT_EQ(entries_of(folder.path()), 0);
}

std::vector<Place> places() {
  std::vector<Place> list;
  for (const bool full : {false, true}) {
    for (const std::string key : {"announce/0", "roster", "world", "go"}) {
      list.push_back({0, "test/" + key, full});
    }
    for (const std::string key : {"announce/2", "confirm/2"}) {
      list.push_back({2, "test/" + key, full});
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Keys, FullStore, ::testing::ValuesIn(places()), [](const auto& of) {
  std::string name = of.param.key.substr(5) + (of.param.full ? "_full" : "");
  std::ranges::replace(name, '/', '_');
  return name;
});

}  // namespace
}  // namespace winnow::expert_parallel
