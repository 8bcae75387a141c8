#include "tools/winnow/demo/text_reader.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "winnow/core/error.h"

namespace winnow::demo {
namespace {

constexpr char kByteOrderMark[] = {'\xef', '\xbb', '\xbf'};
constexpr std::size_t kLongestCharacter = 4;

[[noreturn]] void refuse(const std::string& wanted, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "demo", "FILE", wanted, got);
}

std::string in_quotes(const std::string& name) {
  std::string text(1, '"');
  return text.append(name).append(1, '"');
}

std::string hex_byte(char byte) {
  char text[8];
  std::snprintf(text, sizeof text, "0x%02x",
                static_cast<unsigned>(static_cast<unsigned char>(byte)));
  return text;
}

bool is_space(char byte) {
  return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r' || byte == '\v' ||
         byte == '\f';
}

}  // namespace

std::size_t utf8_character_length(std::span<const char> bytes) {
  if (bytes.empty()) return 0;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  std::size_t length = 0;
  // The second byte has a narrower range where the form would be overlong, a surrogate or too big.
  unsigned second_min = 0x80, second_max = 0xbf;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) second_min = 0xa0;
    if (lead == 0xed) second_max = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) second_min = 0x90;
    if (lead == 0xf4) second_max = 0x8f;
  } else {
    return 0;
  }
  if (bytes.size() < length) return 0;
  if (byte(1) < second_min || byte(1) > second_max) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
  }
  return length;
}

Document parse_document(std::span<const char> bytes, std::string name, std::size_t max_bytes) {
  if (bytes.empty()) refuse("a text", in_quotes(name) + ", which is empty");
  std::size_t begin = 0;
  if (bytes.size() >= sizeof kByteOrderMark &&
      std::memcmp(bytes.data(), kByteOrderMark, sizeof kByteOrderMark) == 0) {
    begin = sizeof kByteOrderMark;
  }
  std::size_t end = begin;
  bool only_space = true;
  while (end < bytes.size() && end - begin < max_bytes) {
    if (bytes[end] == '\0') {
      refuse("UTF-8 text",
             in_quotes(name) + ", which is binary: a NUL byte at offset " + std::to_string(end));
    }
    const std::size_t length = utf8_character_length(bytes.subspan(end));
    if (length == 0) {
      refuse("UTF-8 text", in_quotes(name) + ", which is binary or in another encoding: byte " +
                               hex_byte(bytes[end]) + " at offset " + std::to_string(end) +
                               " begins no UTF-8 character");
    }
    if (end + length - begin > max_bytes) break;
    only_space = only_space && is_space(bytes[end]);
    end += length;
  }
  if (end == begin && bytes.size() == begin) refuse("a text", in_quotes(name) + ", which is empty");
  if (only_space) {
    refuse("a text", in_quotes(name) + ", which holds nothing but white space in its first " +
                         std::to_string(end - begin) + " bytes");
  }
  if (end - begin < kMinDocumentBytes && end == bytes.size()) {
    refuse("a text of at least " + std::to_string(kMinDocumentBytes) + " bytes",
           in_quotes(name) + " with " + std::to_string(end - begin));
  }
  Document document;
  document.name = std::move(name);
  document.text.assign(bytes.data() + begin, end - begin);
  document.truncated = end < bytes.size();
  return document;
}

Document read_document(const std::string& path, std::size_t max_bytes) {
  const std::string wanted = "a readable text file";
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    refuse(wanted, in_quotes(path) + ", which does not exist");
  }
  if (status.type() == std::filesystem::file_type::directory) {
    refuse(wanted, in_quotes(path) + ", which is a directory");
  }
  const auto cannot_read = [&](int code) {
    refuse(wanted,
           in_quotes(path) + ", which cannot be read: " + std::generic_category().message(code));
  };
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) cannot_read(errno);
  // Enough to see the character at the cut whole, and whether anything follows it.
  std::string bytes(sizeof kByteOrderMark + max_bytes + kLongestCharacter, '\0');
  errno = 0;
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file.get()));
  if (std::ferror(file.get()) != 0) cannot_read(errno);
  return parse_document(bytes, path, max_bytes);
}

}  // namespace winnow::demo
