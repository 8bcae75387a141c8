// What another process says: only within its bounds, and only as text.
#include "winnow/expert_parallel/transport/untrusted.h"

#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/test_ranks.h"

namespace winnow::expert_parallel {
namespace {

constexpr Sender kBy{"expert_parallel::dispatch", "the counts", 2};

TEST(Untrusted, GivesANumberWithinItsBounds) {
  Untrusted<std::int32_t> message{};
  for (const std::int32_t value : {-1, 0, 7}) {
    message.write(value);
    EXPECT_EQ(message.read(kBy, "tokens", -1, 7), value);
  }
  for (const std::int32_t value : {-2, 8, INT32_MIN, INT32_MAX}) {
    message.write(value);
    EXPECT_EQ(error_of([&] { message.read(kBy, "tokens", -1, 7); }),
              "expert_parallel::dispatch: the counts of rank 2: tokens: want -1 to 7, got " +
                  std::to_string(value) + ": something else has written to what the ranks share");
  }
  Untrusted<std::uint64_t> large{};
  large.write(~std::uint64_t{0});
  EXPECT_NE(error_of([&] { large.read(kBy, "bytes", 0, INT64_MAX); }), "");
}

struct Two {
  std::int32_t first, second;
};
void check_bounds(const Two& two, const Sender& by, std::int64_t most) {
  check_bounds(two.first, by, "the first", 0, most);
  check_bounds(two.second, by, "the second", 0, two.first);
}

TEST(Untrusted, GivesAStructAllOfWhoseNumbersHaveBounds) {
  Untrusted<Two> message{};
  message.write({5, 3});
  EXPECT_EQ(message.read(kBy, 5).second, 3);
  EXPECT_NE(error_of([&] { message.read(kBy, 4); }), "");
  message.write({3, 5});
  EXPECT_NE(error_of([&] { message.read(kBy, 5); }), "");
}

TEST(Untrusted, GivesTextThatCanBePrinted) {
  const auto received = [](const std::string& bytes) {
    char memory[8];
    std::memset(memory, 0xff, sizeof(memory));
    std::memcpy(memory, bytes.data(), std::min(bytes.size(), sizeof(memory)));
    return untrusted_text(memory);
  };
  EXPECT_EQ(received(std::string("rank\0\xff\xff\xff", 8)), "rank");
  EXPECT_EQ(received("rank"), "rank????");  // without an end
  EXPECT_EQ(received("longer than it"), "longer t");
  EXPECT_EQ(received(std::string("\xc3\xbc\n\x01\xe2\x82\xac\0", 8)), "\xc3\xbc\n?\xe2\x82\xac");
  EXPECT_EQ(received(std::string("\xc3\xed\xa0\x80\xc0\x80\xf4\0", 8)), "???????");
}

TEST(Untrusted, GivesANumberOfATextWithinItsBounds) {
  const auto read = [](const std::string& text) {
    return untrusted_number(text, kBy, "begun", -1, 7);
  };
  EXPECT_EQ(read("-1"), -1);
  EXPECT_EQ(read("7"), 7);
  EXPECT_EQ(
      error_of([&] { read("8"); }),
      "expert_parallel::dispatch: the counts of rank 2: begun: want -1 to 7, got 8: something "
      "else has written to what the ranks share");
  EXPECT_EQ(error_of([&] { read("7 \xff"); }),
            "expert_parallel::dispatch: the counts of rank 2: begun: want a number, got \"7 ?\": "
            "something else has written to what the ranks share");
  for (const std::string text : {"", " 7", "+7", "7.0", "99999999999999999999"}) {
    EXPECT_NE(error_of([&] { read(text); }), "") << text;
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
