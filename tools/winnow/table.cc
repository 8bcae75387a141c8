#include "tools/winnow/table.h"

#include <algorithm>

namespace winnow::cli {
namespace {

// Columns that a UTF-8 text takes, as far as one code point takes one column.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

}  // namespace

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(width(column.title));
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width(row[c]));
  }
  const auto print_row = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width(cells[c]), ' ');
      if (c != 0) line += "  ";
      line += columns_[c].align == Align::right ? padding + cells[c] : cells[c] + padding;
    }
    out << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
  };
  std::vector<std::string> titles;
  std::vector<std::string> rules;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    titles.push_back(columns_[c].title);
    rules.emplace_back(widths[c], '-');
  }
  print_row(titles);
  print_row(rules);
  for (const auto& row : rows_) print_row(row);
}

}  // namespace winnow::cli
