// What another process says: only within its bounds, and only as text.
#include "winnow/expert_parallel/transport/said.h"

#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"

namespace winnow::expert_parallel {
namespace {

constexpr Speaker kBy{"expert_parallel::dispatch", "the counts", 2};

TEST(Said, GivesANumberWithinItsBounds) {
  Said<std::int32_t> said{};
  for (const std::int32_t value : {-1, 0, 7}) {
    said.say(value);
    EXPECT_EQ(said.hear(kBy, "tokens", -1, 7), value);
  }
  for (const std::int32_t value : {-2, 8, INT32_MIN, INT32_MAX}) {
    said.say(value);
    EXPECT_EQ(error_of([&] { said.hear(kBy, "tokens", -1, 7); }),
              "expert_parallel::dispatch: the counts of rank 2: tokens: want -1 to 7, got " +
                  std::to_string(value) +
                  ": something else has written to the memory that the ranks share");
  }
  Said<std::uint64_t> large{};
  large.say(~std::uint64_t{0});
  EXPECT_NE(error_of([&] { large.hear(kBy, "bytes", 0, INT64_MAX); }), "");
}

struct Two {
  std::int32_t first, second;
};
void check_said(const Two& two, const Speaker& by, std::int64_t most) {
  check_said(two.first, by, "the first", 0, most);
  check_said(two.second, by, "the second", 0, two.first);
}

TEST(Said, GivesAStructAllOfWhoseNumbersHaveBounds) {
  Said<Two> said{};
  said.say({5, 3});
  EXPECT_EQ(said.hear(kBy, 5).second, 3);
  EXPECT_NE(error_of([&] { said.hear(kBy, 4); }), "");
  said.say({3, 5});
  EXPECT_NE(error_of([&] { said.hear(kBy, 5); }), "");
}

TEST(Said, GivesTextThatCanBePrinted) {
  const auto heard = [](const std::string& bytes) {
    char memory[8];
    std::memset(memory, 0xff, sizeof(memory));
    std::memcpy(memory, bytes.data(), std::min(bytes.size(), sizeof(memory)));
    return said_text(memory);
  };
  EXPECT_EQ(heard(std::string("rank\0\xff\xff\xff", 8)), "rank");
  EXPECT_EQ(heard("rank"), "rank????");  // without an end
  EXPECT_EQ(heard("longer than it"), "longer t");
  EXPECT_EQ(heard(std::string("\xc3\xbc\n\x01\xe2\x82\xac\0", 8)), "\xc3\xbc\n?\xe2\x82\xac");
  EXPECT_EQ(heard(std::string("\xc3\xed\xa0\x80\xc0\x80\xf4\0", 8)), "???????");
}

}  // namespace
}  // namespace winnow::expert_parallel
