#include "winnow/expert_parallel/rendezvous/agreement_board.h"

#include <charconv>
#include <set>
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

std::optional<int> AgreementBoard::take_mute(const std::string& nonce, int world_size) const {
  if (!look(mute_key(nonce))) return std::nullopt;
  std::optional<int> mute;
  for (int rank = 0; rank < world_size && !mute; ++rank) {
    if (look(mute_key(nonce) + "/" + std::to_string(rank))) mute = rank;
  }
  store_.remove(mute_key(nonce));
  return mute;
}

void AgreementBoard::go_mute(int rank, const std::vector<std::string>& nonces) const noexcept {
  try {
    // Each once, since a rank takes the keys away when it has read them.
    for (const std::string& nonce : std::set(nonces.begin(), nonces.end())) {
      store_.set(mute_key(nonce) + "/" + std::to_string(rank), "");
      store_.set(mute_key(nonce), "");
    }
  } catch (...) {
    // The others have their deadline.
  }
}

std::vector<std::string> AgreementBoard::nonces(int world_size) const {
  std::vector<std::string> nonces;
  for (int rank = 0; rank < world_size; ++rank) {
    if (const auto seen = announcement(rank)) nonces.push_back(seen->nonce);
  }
  return nonces;
}

std::string to_fault(const Error& error, const ProcessIdentity* writer,
                     const std::vector<std::string>& nonces) {
  std::string text = std::to_string(static_cast<int>(error.code())) + "\n" +
                     one_line(message_of(error)) + "\n" + (writer ? to_text(*writer) : "-") + "\n";
  for (const std::string& nonce : nonces) text += nonce + "\n";
  return text;
}

bool check_fault(const AgreementBoard& board, const AgreementRequest& request,
                 const std::string& nonce) {
  if (const auto rank = board.take_mute(nonce, request.world_size)) {
    throw Error(ErrorCode::resource, request.operation,
                "rank " + std::to_string(*rank) + " gave up and could not write why to the store");
  }
  const std::optional<std::string> text = board.fault();
  if (!text) return false;
  std::string_view rest = *text;
  int code = static_cast<int>(ErrorCode::internal);
  const std::string_view number = take_line(rest);
  std::from_chars(number.data(), number.data() + number.size(), code);
  const std::string message(take_line(rest));
  const auto writer = process_from_text(take_line(rest));
  const bool lasting = writer && state_of(*writer) != ProcessState::gone;
  if (!request.fresh_prefix && !lasting && rest.find(nonce) == std::string::npos) return true;
  if (code < 0 || code > static_cast<int>(ErrorCode::internal))
    code = static_cast<int>(ErrorCode::internal);
  throw error_from_message(static_cast<ErrorCode>(code), request.operation, message);
}

}  // namespace winnow::expert_parallel
