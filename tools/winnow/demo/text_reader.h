// Reads the document of the demo and refuses what is no text.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace winnow::demo {

// Fewer bytes than this leave an indexer nothing to choose from.
inline constexpr std::size_t kMinDocumentBytes = 256;

struct Document {
  std::string name;        // as in messages: the path
  std::string text;        // valid UTF-8 without a byte order mark, cut between two characters
  bool truncated = false;  // there was more text than max_bytes
};

// The first max_bytes of a UTF-8 text as a document. `bytes` is the text from its beginning; what
// follows the cut is not looked at. Errors (winnow::Error, invalid_argument): empty, binary (a NUL
// byte or invalid UTF-8, with its offset), only white space, shorter than kMinDocumentBytes.
Document parse_document(std::span<const char> bytes, std::string name, std::size_t max_bytes);

// The same from a file, of which no more is read than needed. Errors: those of parse_document; a
// file that is missing, a directory or unreadable.
Document read_document(const std::string& path, std::size_t max_bytes);

// Length of the UTF-8 character at the start of `bytes`, or 0 if none is well formed there:
// stray or missing continuation bytes, overlong forms, surrogates, beyond U+10FFFF.
std::size_t utf8_character_length(std::span<const char> bytes);

}  // namespace winnow::demo
