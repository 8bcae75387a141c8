#include "tools/winnow/demo/text_reader.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/testing/temporary_folder.h"

namespace winnow::demo {
namespace {

constexpr std::size_t kMaxBytes = 1000;
constexpr std::size_t kNoLimit = 1 << 20;

std::string prose(std::size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += "Wheat is winnowed from chaff. ";
  return text.substr(0, bytes);
}

// The message with which the bytes are refused; empty if they are not.
std::string refusal(const std::string& bytes, std::size_t max_bytes = kNoLimit) {
  try {
    parse_document(bytes, "x.txt", max_bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.argument(), "FILE");
    return error.what();
  }
  return "";
}

void expect_refused(const std::string& bytes, const std::string& part) {
  const std::string message = refusal(bytes);
  EXPECT_NE(message.find(part), std::string::npos) << "message: \"" << message << "\"";
  EXPECT_NE(message.find("\"x.txt\""), std::string::npos) << message;
}

std::string read_refusal(const std::string& path) {
  try {
    read_document(path, kMaxBytes);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class TextReaderFiles : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) {
    const std::string path = (directory_.path() / name).string();
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  testing::TemporaryFolder directory_;
};

TEST(TextReader, TakesTextUpToTheLimit) {
  const Document whole = parse_document(prose(600), "x.txt", kMaxBytes);
  EXPECT_EQ(whole.text, prose(600));
  EXPECT_EQ(whole.name, "x.txt");
  EXPECT_FALSE(whole.truncated);
  const Document cut = parse_document(prose(3000), "x.txt", kMaxBytes);
  EXPECT_EQ(cut.text, prose(kMaxBytes));
  EXPECT_TRUE(cut.truncated);
  EXPECT_FALSE(parse_document(prose(kMaxBytes), "x.txt", kMaxBytes).truncated);
}

TEST(TextReader, CutsBetweenCharacters) {
  for (const std::string character : {"\u00e9", "\u2265", "\U0001f33e"}) {
    for (std::size_t before = 0; before < character.size(); ++before) {
      const std::string bytes = prose(kMaxBytes - before) + character + prose(300);
      const Document document = parse_document(bytes, "x.txt", kMaxBytes);
      EXPECT_EQ(document.text, prose(kMaxBytes - before)) << before;
      EXPECT_TRUE(document.truncated);
    }
    const std::string fits = prose(kMaxBytes - character.size()) + character;
    EXPECT_EQ(parse_document(fits + "more", "x.txt", kMaxBytes).text, fits);
  }
}

TEST(TextReader, SkipsTheByteOrderMark) {
  const std::string bytes = "\xef\xbb\xbf" + prose(400);
  EXPECT_EQ(parse_document(bytes, "x.txt", kMaxBytes).text, prose(400));
  expect_refused("\xef\xbb\xbf", "which is empty");
}

TEST(TextReader, RefusesWhatIsNoText) {
  expect_refused("", "which is empty");
  expect_refused(std::string(400, ' '), "nothing but white space");
  expect_refused("\n\t\r " + std::string(600, '\n'), "nothing but white space");
  expect_refused(prose(kMinDocumentBytes - 1), "at least 256 bytes, got \"x.txt\" with 255");
  EXPECT_EQ(refusal(prose(kMinDocumentBytes)), "");
  expect_refused(prose(300) + std::string(1, '\0') + prose(10), "a NUL byte at offset 300");
  expect_refused(prose(300) + "\xff" + prose(10), "byte 0xff at offset 300");
  expect_refused("\xef\xbb\xbf" + prose(300) + "\xff", "at offset 303");  // offsets in the file
}

TEST(TextReader, RefusesMalformedCharactersAtTheirFirstByte) {
  for (const std::string bytes : {
           "\x80",              // continuation without a lead
           "\xc3(",             // lead without continuation
           "\xc0\xaf",          // overlong
           "\xe0\x80\xaf",      // overlong
           "\xed\xa0\x80",      // surrogate
           "\xf4\x90\x80\x80",  // beyond U+10FFFF
           "\xe2\x82",          // ends too early
       }) {
    expect_refused(prose(300) + bytes, "at offset 300");
  }
}

TEST(TextReader, DoesNotLookBeyondTheCut) {
  EXPECT_EQ(refusal(prose(kMaxBytes) + std::string(5, '\0'), kMaxBytes), "");
  EXPECT_NE(refusal(prose(kMaxBytes - 1) + std::string(5, '\0'), kMaxBytes), "");
}

TEST_F(TextReaderFiles, ReadsAFile) {
  const Document document = read_document(write("a.txt", prose(5000)), kMaxBytes);
  EXPECT_EQ(document.text, prose(kMaxBytes));
  EXPECT_TRUE(document.truncated);
  EXPECT_FALSE(read_document(write("b.txt", prose(kMaxBytes)), kMaxBytes).truncated);
}

TEST_F(TextReaderFiles, ReadsNoMoreOfAHugeFileThanNeeded) {
  const std::string path = write("huge.txt", prose(5000));
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40);  // sparse: 1 TiB on no disk
  EXPECT_EQ(read_document(path, kMaxBytes).text, prose(kMaxBytes));
}

TEST_F(TextReaderFiles, RefusesWhatCannotBeRead) {
  EXPECT_NE(read_refusal((directory_.path() / "none").string()).find("which does not exist"),
            std::string::npos);
  EXPECT_NE(read_refusal(directory_.path().string()).find("which is a directory"),
            std::string::npos);
  EXPECT_NE(read_refusal(write("empty", "")).find("which is empty"), std::string::npos);
  EXPECT_NE(read_refusal("/dev/zero").find("a NUL byte at offset 0"), std::string::npos);
  // Opens, but its first page cannot be read.
  EXPECT_NE(read_refusal("/proc/self/mem").find("cannot be read: Input/output error"),
            std::string::npos);
  if (::geteuid() == 0) return;  // root may read everything
  const std::string secret = write("secret", prose(400));
  ASSERT_EQ(::chmod(secret.c_str(), 0), 0);
  EXPECT_NE(read_refusal(secret).find("cannot be read: Permission denied"), std::string::npos);
}

}  // namespace
}  // namespace winnow::demo
