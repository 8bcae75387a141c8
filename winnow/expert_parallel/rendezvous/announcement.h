// The text that a rank writes into the store when it arrives. Internal.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/process.h"

namespace winnow::expert_parallel {

// Names and values, each of one line.
using Fields = std::vector<std::pair<std::string, std::string>>;

struct Announcement {
  std::string nonce;  // of one caller
  ProcessIdentity process;
  int world_size = 0;
  Fields same;  // to be equal on every rank
  Fields own;   // what the others want to know
};

// All announcements of a world, by rank.
struct Roster {
  std::string id;
  std::vector<Announcement> announcements;
};

std::string one_line(std::string text);
// Removes the first line from the text and returns it.
WINNOW_EXPORT std::string_view take_line(std::string_view& text);
// "rank 2", "ranks 0, 1, 3"
std::string list_of_ranks(const std::vector<int>& ranks);

// The ranks that have each value of a field.
using RanksOfValues = std::map<std::string, std::vector<int>>;
// Of a field of `same`; "nothing" where a rank has none.
RanksOfValues ranks_of_values(const std::vector<Announcement>& announcements,
                              const std::string& field);
// "7168 (ranks 0, 2), 4096 (rank 1)", by the first rank of each.
std::string list_of_values(const RanksOfValues& ranks_of);

WINNOW_EXPORT std::string to_text(const Announcement& announcement);
WINNOW_EXPORT std::string to_text(const Roster& roster);
// Throw Error (internal) if the text is not one of to_text() of this version.
WINNOW_EXPORT Announcement announcement_from_text(std::string_view text, const Sender& by);
WINNOW_EXPORT Roster roster_from_text(std::string_view text, const Sender& by);

}  // namespace winnow::expert_parallel
