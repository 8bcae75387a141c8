#include "tools/winnow/printable.h"

#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/demo/text_reader.h"

namespace winnow::cli {
namespace {

// C0 and DEL are one byte; C1 (U+0080 to U+009F) is two.
bool is_control(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7f;
  return character.size() == 2 && byte(0) == 0xc2 && byte(1) < 0xa0;
}

}  // namespace

std::string printable(std::string_view text, bool lines) {
  std::string result;
  while (!text.empty()) {
    const std::size_t length = demo::utf8_character_length(text);
    const std::string_view character = text.substr(0, length == 0 ? 1 : length);
    const bool shown = length != 0 && (!is_control(character) || (lines && character == "\n"));
    for (const char byte : character) {
      result += shown ? std::string(1, byte)
                      : demo::format_text("\\x%02x", unsigned(static_cast<unsigned char>(byte)));
    }
    text.remove_prefix(character.size());
  }
  return result;
}

}  // namespace winnow::cli
