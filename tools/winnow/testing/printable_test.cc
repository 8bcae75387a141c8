#include "tools/winnow/printable.h"

#include <sstream>
#include <string>

#include "tools/winnow/demo/state.h"
#include "tools/winnow/progress.h"
#include <gtest/gtest.h>

namespace winnow::cli {
namespace {

TEST(Printable, ShowsTextAsItIs) {
  for (const char* text : {"", "notes.txt", "a b\\c", "caf\xc3\xa9", "\xe9\xba\xa6", "\xc2\xa0"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, EscapesControlCharacters) {
  EXPECT_EQ(printable("\x1b[31m"), "\\x1b[31m");
  EXPECT_EQ(printable("a\r\n\tb\x7f"), "a\\x0d\\x0a\\x09b\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");  // a C1 control character, which begins a control sequence
  EXPECT_EQ(printable("two\nlines\x1b", true), "two\nlines\\x1b");
}

TEST(Printable, EscapesWhatIsNotUtf8) {
  EXPECT_EQ(printable("\x9b"
                      "31m"),
            "\\x9b31m");
  EXPECT_EQ(printable("caf\xe9"), "caf\\xe9");
  EXPECT_EQ(printable("\xe9\xba"), "\\xe9\\xba");
}

// One of these sentences contains the name of the document.
TEST(Printable, SentencesOfTheDemoAreEscaped) {
  demo::StepReport report;
  report.done.push_back("all of \x1b]0;title\x07");
  std::ostringstream out;
  demo::print_step(out, 1, report);
  EXPECT_NE(out.str().find("all of \\x1b]0;title\\x07"), std::string::npos) << out.str();
}

TEST(Progress, LinesAreCutBetweenCharacters) {
  EXPECT_EQ(cut_to_width("winnow", 6), "winnow");
  EXPECT_EQ(cut_to_width("winnow", 3), "win");
  EXPECT_EQ(cut_to_width("\xc3\xa9\xc3\xa9", 1), "\xc3\xa9");
  EXPECT_EQ(cut_to_width("winnow", 0), "");
}

}  // namespace
}  // namespace winnow::cli
