// Reads the training text as bytes, u8 [length]: a file, or all sources and pages of a folder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <winnow/winnow.h>

inline winnow::Tensor read_text(const std::string& path) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
      const fs::path extension = entry.path().extension();
      for (const char* known : {".txt", ".md", ".h", ".cc", ".cu", ".cuh", ".py"}) {
        if (entry.is_regular_file() && extension == known) files.push_back(entry.path());
      }
    }
    std::sort(files.begin(), files.end());  // directory_iterator has no defined order
  } else {
    files.push_back(path);
  }
  std::string text;
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw std::runtime_error("--text: " + file.string() + " cannot be read");
    text.append(std::istreambuf_iterator<char>(stream), {});
  }
  winnow::Tensor bytes(winnow::DType::u8, {static_cast<std::int64_t>(text.size())});
  std::copy(text.begin(), text.end(), bytes.values<std::uint8_t>().begin());
  return bytes;
}
