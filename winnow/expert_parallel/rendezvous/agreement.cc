// Rank 0 coordinates. Keys under the prefix:
//
//   announce/R   rank R: a nonce, its process, its fields
//   roster       rank 0: an id and all announcements, once all have come
//   confirm/R    rank R: that id, once it has found its own nonce in the roster and no difference
//   go           rank 0: that id, once all have confirmed it
//   fault        any rank that gives up: why, and whom it concerns
//
// Nothing that an earlier attempt left can be taken for this one's: a roster counts for a rank only
// with the rank's own nonce, and where rank 0 took an old announcement for a new one, the new one
// has another nonce and a new roster follows.
#include "winnow/expert_parallel/rendezvous/agreement.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <thread>

#include "winnow/core/error.h"
#include "winnow/core/version.h"
#include "winnow/expert_parallel/transport/fault.h"

namespace winnow::expert_parallel {
namespace {

using Seen = std::vector<std::optional<Announcement>>;  // by rank

// One rank's part in one agreement.
class Meeting {
 public:
  Meeting(Store& store, const AgreementRequest& request, const Deadline& deadline)
      : store_(store), request_(request), deadline_(deadline) {
    own_.nonce = random_id();
    own_.process = own_process();
    own_.world_size = request.world_size;
    own_.same.emplace_back("library version", WINNOW_VERSION);
    own_.same.insert(own_.same.end(), request.same.begin(), request.same.end());
    own_.own = request.own;
  }

  Agreement run() {
    store_.set(announce_key(request_.rank), to_text(own_));
    try {
      request_.rank == 0 ? coordinate() : follow();
    } catch (...) {
      leave();
      throw;
    }
    leave();
    Agreement agreement;
    agreement.id = roster_.id;
    for (const Announcement& announcement : roster_.announcements) {
      agreement.own.push_back(announcement.own);
      agreement.processes.push_back(announcement.process);
    }
    return agreement;
  }

 private:
  void coordinate() {
    for (;; pause()) {
      look_for_fault();
      check_own_announcement();
      const Seen seen = read_announcements();
      check_world_size(seen);
      if (std::all_of(seen.begin(), seen.end(),
                      [](const auto& rank) { return rank.has_value(); }) &&
          !roster_is_of(seen)) {
        roster_.id = random_id();
        roster_.announcements.clear();
        for (const auto& announcement : seen) roster_.announcements.push_back(*announcement);
        store_.set(key("roster"), to_text(roster_));
        check_same();
        pause_ = kFirstPause;
      }
      if (!roster_.id.empty() && unconfirmed().empty()) break;
      if (deadline_.expired()) give_up(seen);
    }
    store_.remove(key("fault"));
    store_.set(key("go"), roster_.id);
  }

  void follow() {
    for (;; pause()) {
      look_for_fault();
      check_own_announcement();
      const bool alone = !roster_.id.empty() && gone(roster_.announcements[0]);
      // In this order: what rank 0 wrote before it ended counts, and so does `go` where rank 0 has
      // begun the next agreement already and taken this announcement for one to that.
      Roster found = read_roster();
      if (!roster_.id.empty() && look(key("go")) == roster_.id) return;
      if (!found.id.empty() && found.id != roster_.id) {
        roster_ = std::move(found);
        check_same();
        store_.set(confirm_key(request_.rank), roster_.id + own_.nonce);
        pause_ = kFirstPause;
        continue;
      }
      if (alone) fail_gone(0, roster_.announcements[0]);
      Seen first(1);
      first[0] = read_announcement(0);
      check_world_size(first);
      if (deadline_.expired()) give_up(read_announcements());
    }
  }

  // Takes away what this rank has written, unless another process of this rank has replaced it.
  void leave() noexcept {
    try {
      store_.remove(confirm_key(request_.rank));
      const auto announcement = read_announcement(request_.rank);
      if (announcement && announcement->nonce == own_.nonce) {
        store_.remove(announce_key(request_.rank));
      }
    } catch (...) {
      // The agreement itself is over, well or not.
    }
  }

  void pause() {
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause_, deadline_.remaining()));
    pause_ = std::min(2 * pause_, kLongestPause);
  }

  // ---- What the store says.

  std::string key(const std::string& name) const { return request_.prefix + "/" + name; }
  std::string announce_key(int rank) const { return key("announce/" + std::to_string(rank)); }
  std::string confirm_key(int rank) const { return key("confirm/" + std::to_string(rank)); }
  std::optional<std::string> look(const std::string& name) {
    return store_.get(name, Deadline::now());
  }

  std::optional<Announcement> read_announcement(int rank) {
    const std::optional<std::string> text = look(announce_key(rank));
    if (!text) return std::nullopt;
    std::vector<Announcement> announcements = announcements_from_text(*text);
    if (announcements.size() != 1) return std::nullopt;
    return std::move(announcements[0]);
  }

  // Of the processes that live: another announcement was left by an earlier world, and the new rank
  // may still come; under a fresh prefix it never will.
  Seen read_announcements() {
    Seen seen;
    for (int rank = 0; rank < request_.world_size; ++rank) {
      auto announcement = read_announcement(rank);
      if (announcement && gone(*announcement)) {
        if (request_.fresh_prefix) fail_gone(rank, *announcement);
        announcement.reset();
      }
      seen.push_back(std::move(announcement));
    }
    return seen;
  }

  // Empty unless this rank stands in it as it announced itself.
  Roster read_roster() {
    const std::optional<std::string> text = look(key("roster"));
    if (!text) return {};
    Roster roster = roster_from_text(*text);
    if (static_cast<int>(roster.announcements.size()) != request_.world_size) return {};
    const auto rank = static_cast<std::size_t>(request_.rank);
    if (roster.announcements[rank].nonce != own_.nonce) return {};
    return roster;
  }

  bool roster_is_of(const Seen& seen) const {
    return std::equal(
        seen.begin(), seen.end(), roster_.announcements.begin(), roster_.announcements.end(),
        [](const auto& now, const Announcement& then) { return now->nonce == then.nonce; });
  }

  std::vector<int> unconfirmed() {
    std::vector<int> ranks;
    for (int rank = 1; rank < request_.world_size; ++rank) {
      const std::string& nonce = roster_.announcements[static_cast<std::size_t>(rank)].nonce;
      if (look(confirm_key(rank)) != roster_.id + nonce) ranks.push_back(rank);
    }
    return ranks;
  }

  static bool gone(const Announcement& announcement) {
    return state_of(announcement.process) == ProcessState::gone;
  }

  // ---- What may be wrong.

  // A fault concerns those whom its writer has seen. Where the sizes of the world differ it also
  // concerns whoever comes later, as long as the writer lives.
  void look_for_fault() {
    const std::optional<std::string> text = look(key("fault"));
    if (!text) return;
    std::string_view rest = *text;
    const bool timeout = take_line(rest) == "timeout";
    const std::string message(take_line(rest));
    const auto writer = process_from_text(take_line(rest));
    const bool lasting = writer && state_of(*writer) != ProcessState::gone;
    if (!request_.fresh_prefix && !lasting && rest.find(own_.nonce) == std::string::npos) return;
    throw Error(timeout ? ErrorCode::timeout : ErrorCode::invalid_argument, request_.operation,
                message);
  }

  // Tells the others, and throws.
  [[noreturn]] void fail(const Error& error, bool lasting = false) {
    std::string fault = error.code() == ErrorCode::timeout ? "timeout\n" : "invalid_argument\n";
    fault += one_line(message_of(error)) + "\n";
    fault += (lasting ? to_text(own_.process) : "-") + "\n" + own_.nonce + "\n";
    for (int rank = 0; rank < request_.world_size; ++rank) {
      if (const auto announcement = read_announcement(rank)) fault += announcement->nonce + "\n";
    }
    store_.set(key("fault"), fault);
    throw error;
  }
  [[noreturn]] void fail_timeout(const std::string& text) {
    fail(Error(ErrorCode::timeout, request_.operation, text));
  }
  [[noreturn]] void fail_gone(int rank, const Announcement& announcement) {
    fail_timeout("rank " + std::to_string(rank) +
                 " ended before all ranks had met: " + describe(announcement.process));
  }

  // `ranks_of` has the values of one field.
  [[noreturn]] void fail_differing(const std::string& field,
                                   const std::map<std::string, std::vector<int>>& ranks_of) {
    std::vector<std::pair<std::vector<int>, std::string>> groups;  // by their first rank
    for (const auto& [value, ranks] : ranks_of) groups.emplace_back(ranks, value);
    std::sort(groups.begin(), groups.end());
    std::string got;
    for (const auto& [ranks, value] : groups) {
      got += (got.empty() ? "" : ", ") + value + " (" + list_of_ranks(ranks) + ")";
    }
    fail(Error(ErrorCode::invalid_argument, request_.operation, field, "the same on every rank",
               got),
         field == kWorldSize);
  }

  // As soon as it shows, since worlds of different sizes never become complete.
  void check_world_size(const Seen& seen) {
    std::map<std::string, std::vector<int>> ranks_of;
    for (int rank = 0; rank < static_cast<int>(seen.size()); ++rank) {
      const auto& announcement = seen[static_cast<std::size_t>(rank)];
      if (!announcement || rank == request_.rank || gone(*announcement)) continue;
      ranks_of[std::to_string(announcement->world_size)].push_back(rank);
    }
    std::vector<int>& same = ranks_of[std::to_string(own_.world_size)];
    same.insert(std::lower_bound(same.begin(), same.end(), request_.rank), request_.rank);
    if (ranks_of.size() > 1) fail_differing(kWorldSize, ranks_of);
  }

  // Every rank compares all, and all find the same difference.
  void check_same() {
    for (const Announcement& announcement : roster_.announcements) {
      for (const auto& field : announcement.same) check_same(field.first);
    }
  }
  void check_same(const std::string& field) {
    std::map<std::string, std::vector<int>> ranks_of;
    for (std::size_t rank = 0; rank < roster_.announcements.size(); ++rank) {
      const Fields& fields = roster_.announcements[rank].same;
      const auto found = std::find_if(fields.begin(), fields.end(),
                                      [&](const auto& other) { return other.first == field; });
      ranks_of[found == fields.end() ? "nothing" : found->second].push_back(static_cast<int>(rank));
    }
    if (ranks_of.size() > 1) fail_differing(field, ranks_of);
  }

  // Two processes that both claim to be this rank would overwrite each other for ever.
  void check_own_announcement() {
    const auto announcement = read_announcement(request_.rank);
    if (!announcement || announcement->nonce == own_.nonce) return;
    throw Error(ErrorCode::invalid_argument, request_.operation, "rank",
                "one caller as rank " + std::to_string(request_.rank),
                "two: " + describe(own_.process) + ", and " + describe(announcement->process));
  }

  [[noreturn]] void give_up(const Seen& seen) {
    look_for_fault();  // a rank that has just given up is missing in `seen`, but has said why
    const std::string within = " within " + to_seconds(deadline_.timeout());
    std::vector<int> absent;
    for (std::size_t rank = 0; rank < seen.size(); ++rank) {
      if (!seen[rank]) absent.push_back(static_cast<int>(rank));
    }
    if (!absent.empty()) {
      fail_timeout(list_of_ranks(absent) + (absent.size() == 1 ? " has" : " have") +
                   " not arrived" + within);
    }
    // All are there, but somebody does not get on.
    const std::vector<int> waiting = roster_.id.empty() ? std::vector<int>{0} : unconfirmed();
    const int rank = waiting.empty() ? 0 : waiting[0];
    fail_timeout("rank " + std::to_string(rank) + " arrived but did not answer" + within + ": " +
                 describe(seen[static_cast<std::size_t>(rank)]->process));
  }

  static constexpr const char* kWorldSize = "world_size";
  static constexpr std::chrono::nanoseconds kFirstPause = std::chrono::microseconds(100);
  static constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(10);

  Store& store_;
  const AgreementRequest& request_;
  const Deadline& deadline_;
  Announcement own_;
  Roster roster_;  // the last one in which this rank stands
  std::chrono::nanoseconds pause_ = kFirstPause;
};

}  // namespace

Agreement agree(Store& store, const AgreementRequest& request, const Deadline& deadline) {
  if (request.world_size < 1) {
    throw Error(ErrorCode::invalid_argument, request.operation, "world_size", "1 or more",
                std::to_string(request.world_size));
  }
  if (request.rank < 0 || request.rank >= request.world_size) {
    throw Error(ErrorCode::invalid_argument, request.operation, "rank",
                "in [0, " + std::to_string(request.world_size) + ")", std::to_string(request.rank));
  }
  return Meeting(store, request, deadline).run();
}

Agreement agree(Transport& transport, Store& store, const std::string& operation, Fields same,
                const Deadline& deadline, Fields own) {
  transport.check();
  const std::uint64_t number = transport.next_agreement();
  const std::string prefix = transport.world_id() + "/agreement";
  AgreementRequest request;
  request.operation = operation;
  request.prefix = prefix + std::to_string(number);
  request.rank = transport.rank();
  request.world_size = transport.world_size();
  request.same = std::move(same);
  request.same.insert(request.same.begin(), {"transport", transport.name()});
  request.own = std::move(own);
  request.fresh_prefix = true;
  Agreement agreement = agree(store, request, deadline);
  // Who has come to this one has left the one before.
  if (request.rank == 0 && number > 0) store.remove(prefix + std::to_string(number - 1));
  return agreement;
}

}  // namespace winnow::expert_parallel
