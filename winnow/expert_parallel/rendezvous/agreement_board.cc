#include "winnow/expert_parallel/rendezvous/agreement_board.h"

#include <string_view>

#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/transport/fault.h"

namespace winnow::expert_parallel {

std::string agreement_key(const std::string& world_id, std::uint64_t number) {
  return world_id + "/agreement" + std::to_string(number);
}

std::optional<std::string> AgreementBoard::look(const std::string& key) const {
  return store_.get(key, Deadline::now());
}

std::optional<Announcement> AgreementBoard::announcement(int rank) const {
  const std::optional<std::string> text = look(announce_key(rank));
  if (!text) return std::nullopt;
  std::vector<Announcement> announcements = announcements_from_text(*text);
  if (announcements.size() != 1) return std::nullopt;
  return std::move(announcements[0]);
}

Roster AgreementBoard::roster(int world_size, int rank, const std::string& nonce) const {
  const std::optional<std::string> text = look(roster_key());
  if (!text) return {};
  Roster roster = roster_from_text(*text);
  if (static_cast<int>(roster.announcements.size()) != world_size) return {};
  if (roster.announcements[static_cast<std::size_t>(rank)].nonce != nonce) return {};
  return roster;
}

Roster AgreementBoard::world() const {
  const std::optional<std::string> text = look(world_key());
  return text ? roster_from_text(*text) : Roster();
}

std::string to_fault(const Error& error, const ProcessIdentity* writer,
                     const std::vector<std::string>& nonces) {
  const bool timeout = error.code() == ErrorCode::timeout;
  std::string text = timeout ? "timeout\n" : "invalid_argument\n";
  text += one_line(message_of(error)) + "\n" + (writer ? to_text(*writer) : "-") + "\n";
  for (const std::string& nonce : nonces) text += nonce + "\n";
  return text;
}

bool check_fault(const AgreementBoard& board, const AgreementRequest& request,
                 const std::string& nonce) {
  const std::optional<std::string> text = board.fault();
  if (!text) return false;
  std::string_view rest = *text;
  const bool timeout = take_line(rest) == "timeout";
  const std::string message(take_line(rest));
  const auto writer = process_from_text(take_line(rest));
  const bool lasting = writer && state_of(*writer) != ProcessState::gone;
  if (!request.fresh_prefix && !lasting && rest.find(nonce) == std::string::npos) return true;
  throw error_from_message(timeout ? ErrorCode::timeout : ErrorCode::invalid_argument,
                           request.operation, message);
}

}  // namespace winnow::expert_parallel
