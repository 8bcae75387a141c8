#include "winnow/expert_parallel/transport/untrusted.h"

#include <charconv>
#include <system_error>

namespace winnow::expert_parallel {

void refuse_untrusted(const Sender& by, std::string_view what, const std::string& want,
                      const std::string& got) {
  throw Error(ErrorCode::internal, std::string(by.operation),
              std::string(by.phase) + (by.rank < 0 ? "" : " of rank " + std::to_string(by.rank)) +
                  ": " + std::string(what) + ": want " + want + ", got " + got +
                  ": something else has written to what the ranks share");
}

void refuse_out_of_bounds(const Sender& by, std::string_view what, std::int64_t least,
                          std::int64_t most, std::int64_t got) {
  refuse_untrusted(by, what, std::to_string(least) + " to " + std::to_string(most),
                   std::to_string(got));
}

std::int64_t untrusted_number(std::string_view text, const Sender& by, std::string_view what,
                              std::int64_t least, std::int64_t most) {
  std::int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) {
    refuse_untrusted(by, what, "a number", quoted(text));
  }
  check_bounds(number, by, what, least, most);
  return number;
}

namespace {

// The length of the UTF-8 character that `bytes` begins with; 0 if it is malformed, or a control
// character other than a newline or a tab.
std::size_t length_of_character(std::string_view bytes) {
  const auto byte = [&](std::size_t at) {
    return at < bytes.size() ? static_cast<unsigned char>(bytes[at]) : 0u;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return (first >= ' ' && first != 0x7f) || first == '\n' || first == '\t';
  if (first < 0xc2 || first > 0xf4) return 0;
  const std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (std::size_t at = 1; at < length; ++at) {
    if ((byte(at) & 0xc0) != 0x80) return 0;
  }
  // Overlong encodings, surrogates, and code points beyond U+10FFFF.
  const bool outside = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
                       (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90);
  return outside ? 0 : length;
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const std::size_t length = length_of_character(bytes);
    text += length == 0 ? "?" : bytes.substr(0, length);
    bytes.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return text;
}

std::string quoted(std::string_view bytes) {
  std::string text = "\"";
  text += printable(bytes.substr(0, 80));
  return text += '"';
}

}  // namespace winnow::expert_parallel
