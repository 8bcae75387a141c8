#include "winnow/expert_parallel/rendezvous/announcement.h"

#include <algorithm>

namespace winnow::expert_parallel {
namespace {

// "name value" and "name=value": what stands before and behind the separator.
std::pair<std::string_view, std::string_view> split(std::string_view line, char separator) {
  const std::size_t at = std::min(line.find(separator), line.size());
  return {line.substr(0, at), line.substr(std::min(at + 1, line.size()))};
}

// Removes the next line, "name value".
std::string_view take_value(std::string_view& text, std::string_view wanted, const Sender& by) {
  const std::string_view line = take_line(text);
  const auto [name, value] = split(line, ' ');
  if (name != wanted) refuse_untrusted(by, "a line", std::string(wanted), quoted(line));
  return value;
}

// Removes the next announcement.
Announcement take_announcement(std::string_view& text, const Sender& by) {
  Announcement announcement;
  announcement.nonce = take_value(text, "nonce", by);
  announcement.process = process_from_text(take_value(text, "process", by), by);
  announcement.world_size = static_cast<int>(
      untrusted_number(take_value(text, "world_size", by), by, "world_size", 1, INT32_MAX));
  for (const std::string_view name : {"same", "own"}) {
    while (text.starts_with(name)) {
      const auto [field, content] = split(take_value(text, name, by), '=');
      (name == "same" ? announcement.same : announcement.own).emplace_back(field, content);
    }
  }
  return announcement;
}

}  // namespace

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string_view take_line(std::string_view& text) {
  const auto [line, rest] = split(text, '\n');
  text = rest;
  return line;
}

std::string list_of_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t n = 0; n < ranks.size(); ++n) {
    text += (n > 0 ? ", " : "") + std::to_string(ranks[n]);
  }
  return text;
}

RanksOfValues ranks_of_values(const std::vector<Announcement>& announcements,
                              const std::string& field) {
  RanksOfValues ranks_of;
  for (std::size_t rank = 0; rank < announcements.size(); ++rank) {
    const Fields& fields = announcements[rank].same;
    const auto found = std::ranges::find(fields, field, &Fields::value_type::first);
    ranks_of[found == fields.end() ? "nothing" : found->second].push_back(static_cast<int>(rank));
  }
  return ranks_of;
}

std::string list_of_values(const RanksOfValues& ranks_of) {
  std::vector<std::pair<std::vector<int>, std::string>> groups;
  for (const auto& [value, ranks] : ranks_of) groups.emplace_back(ranks, value);
  std::ranges::sort(groups);
  std::string list;
  for (const auto& [ranks, value] : groups) {
    list += (list.empty() ? "" : ", ") + value + " (" + list_of_ranks(ranks) + ")";
  }
  return list;
}

std::string to_text(const Announcement& announcement) {
  std::string text = "nonce " + announcement.nonce + "\nprocess " + to_text(announcement.process) +
                     "\nworld_size " + std::to_string(announcement.world_size) + "\n";
  for (const auto& [name, value] : announcement.same) {
    text += "same " + name + "=" + one_line(value) + "\n";
  }
  for (const auto& [name, value] : announcement.own) {
    text += "own " + name + "=" + one_line(value) + "\n";
  }
  return text;
}

std::string to_text(const Roster& roster) {
  std::string text = "id " + roster.id + "\n";
  for (const Announcement& announcement : roster.announcements) text += to_text(announcement);
  return text;
}

Announcement announcement_from_text(std::string_view text, const Sender& by) {
  Announcement announcement = take_announcement(text, by);
  if (!text.empty()) refuse_untrusted(by, "a line", "none", quoted(text));
  return announcement;
}

Roster roster_from_text(std::string_view text, const Sender& by) {
  Roster roster;
  roster.id = take_value(text, "id", by);
  while (!text.empty()) roster.announcements.push_back(take_announcement(text, by));
  return roster;
}

}  // namespace winnow::expert_parallel
