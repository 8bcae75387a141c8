// Rank 0 coordinates. The keys under the prefix of an agreement:
//
//   announce/R   rank R: a nonce, its process, its fields
//   roster       rank 0: an id and all announcements, once all have come
//   confirm/R    rank R: that id, once it has found its own nonce in the roster and no difference
//   go           rank 0: that id, last
//   fault        any rank that gives up: the reason
//
// and under the prefix of worlds begun/R, rank R: how many it has begun, and its process.
#include "winnow/expert_parallel/rendezvous/agreement.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/core/version.h"
#include "winnow/expert_parallel/transport/fault.h"

namespace winnow::expert_parallel {
namespace {

// A look at the peers' processes costs a few system calls.
constexpr std::chrono::milliseconds kLookAtPeers{20};
// Rank 0 looks for each of them in the store; it hears of an interrupt, but not of the deadline,
// before it has looked for all.
constexpr int kMostRanks = 65536;

bool gone(const Announcement& announcement) {
  return state_of(announcement.process) == ProcessState::gone;
}

using Seen = std::vector<std::optional<Announcement>>;  // by rank

// What stands in the store under the prefix of one agreement. Nothing here waits.
class Board {
 public:
  Board(Store& store, const AgreementRequest& request)
      : store_(store), operation_(request.operation), prefix_(request.prefix) {}

  std::string key(const std::string& name) const { return prefix_ + "/" + name; }
  std::string key(const std::string& name, int rank) const {
    return key(name + "/" + std::to_string(rank));
  }
  Sender by(std::string_view phase, int rank = -1) const { return {operation_, phase, rank}; }
  // Nothing where there is no such key.
  std::optional<std::string> look(const std::string& key) const {
    std::optional<std::string> text = store_.get(key, Deadline::now());
    if (text) text = printable(*text);
    return text;
  }
  std::optional<Announcement> announcement(int rank) const {
    const std::optional<std::string> text = look(key("announce", rank));
    if (!text) return std::nullopt;
    return announcement_from_text(*text, by("the announcement", rank));
  }
  // Empty, too, where ranks have met whose world is of another size.
  Roster roster(int world_size) const {
    const std::optional<std::string> text = look(key("roster"));
    Roster roster = text ? roster_from_text(*text, by("the roster")) : Roster();
    return static_cast<int>(roster.announcements.size()) == world_size ? roster : Roster();
  }

  // To all ranks, those that come later too.
  void write_fault(const Error& error) const {
    store_.set(key("fault"), std::to_string(static_cast<int>(error.code())) + "\n" +
                                 std::to_string(static_cast<int>(error.reason())) + "\n" +
                                 one_line(message_of(error)));
  }
  // Throws what a rank has told.
  void look_for_fault() const {
    const std::optional<std::string> text = look(key("fault"));
    if (!text) return;
    std::string_view rest = *text;
    const auto number = [&](std::string_view what, auto last) {
      return untrusted_number(take_line(rest), by("the fault"), what, 0, static_cast<int>(last));
    };
    const auto code = static_cast<ErrorCode>(number("code", ErrorCode::internal));
    const auto reason = static_cast<ErrorReason>(number("reason", kLastReason));
    throw error_from_message(code, operation_, std::string(rest), reason);
  }

 private:
  Store& store_;
  std::string operation_, prefix_;
};

// Two jobs under one name, or ranks that are numbered wrongly.
Error two_callers(const AgreementRequest& request, const ProcessIdentity& one,
                  const ProcessIdentity& other) {
  return {ErrorCode::invalid_argument,
          request.operation,
          "rank",
          "one caller as rank " + std::to_string(request.rank),
          "two: " + describe(one) + ", and " + describe(other),
          ErrorReason::two_callers};
}

void check_request(const AgreementRequest& request) {
  if (request.world_size < 1 || request.world_size > kMostRanks) {
    throw Error(ErrorCode::invalid_argument, request.operation, "world_size",
                "1 to " + std::to_string(kMostRanks), std::to_string(request.world_size));
  }
  if (request.rank < 0 || request.rank >= request.world_size) {
    throw Error(ErrorCode::invalid_argument, request.operation, "rank",
                "in [0, " + std::to_string(request.world_size) + ")", std::to_string(request.rank));
  }
}

// One rank's part in one agreement.
class Participant {
 public:
  Participant(Store& store, const AgreementRequest& request, const Deadline& deadline)
      : store_(store), request_(request), deadline_(deadline) {
    own_.nonce = random_id();
    own_.process = own_process();
    own_.world_size = request.world_size;
    own_.same.emplace_back("library version", WINNOW_VERSION);
    own_.same.insert(own_.same.end(), request.same.begin(), request.same.end());
    own_.own = request.own;
  }

  Agreement run() {
    try {
      write(board_.key("announce", request_.rank), to_text(own_));
      request_.rank == 0 ? coordinate() : follow();
    } catch (const Error& error) {
      // What no rank has written, perhaps this one alone has read.
      if (error.code() == ErrorCode::internal) report(error);
      leave();
      throw;
    } catch (...) {
      report(Error(ErrorCode::timeout, request_.operation,
                   "rank " + std::to_string(request_.rank) + " was interrupted",
                   {.reason = ErrorReason::interrupted}));
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
      board_.look_for_fault();
      check_own_announcement();
      const Seen seen = read_announcements();
      check_world_size(seen);
      check_ended(0, request_.world_size);
      if (roster_.id.empty() &&
          std::ranges::all_of(seen, [](const auto& rank) { return rank.has_value(); })) {
        roster_.id = random_id();
        for (const auto& announcement : seen) roster_.announcements.push_back(*announcement);
        write(board_.key("roster"), to_text(roster_));
        check_same();
        pause_ = kFirstPause;
      }
      if (!roster_.id.empty() && unconfirmed().empty()) break;
      if (deadline_.expired()) give_up(seen);
    }
    board_.look_for_fault();
    write(board_.key("go"), roster_.id);
  }

  void follow() {
    for (;; pause()) {
      board_.look_for_fault();
      check_own_announcement();
      // In this order: what rank 0 wrote before it ended counts.
      Seen first(1);
      first[0] = board_.announcement(0);
      const bool alone = first[0] && gone(*first[0]);
      if (!roster_.id.empty() && board_.look(board_.key("go")) == roster_.id) return;
      if (roster_.id.empty()) {
        roster_ = board_.roster(request_.world_size);
        if (!roster_.id.empty()) {
          const Announcement& mine = roster_.announcements[static_cast<std::size_t>(request_.rank)];
          if (mine.nonce != own_.nonce) fail(two_callers(request_, own_.process, mine.process));
          check_same();
          write(board_.key("confirm", request_.rank), roster_.id);
          pause_ = kFirstPause;
          continue;
        }
      }
      if (alone) fail_gone(0, *first[0]);
      check_ended(0, 1);
      check_world_size(first);
      if (deadline_.expired()) give_up(read_announcements());
    }
  }

  // Takes away what this rank has written, unless another process of this rank has replaced it.
  void leave() noexcept {
    try {
      store_.remove(board_.key("confirm", request_.rank));
      const auto announcement = board_.announcement(request_.rank);
      if (announcement && announcement->nonce == own_.nonce) {
        store_.remove(board_.key("announce", request_.rank));
      }
    } catch (...) {
      // The agreement itself is over, well or not.
    }
  }

  void pause() {
    interrupts_.look();
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause_, deadline_.remaining()));
    pause_ = std::min(2 * pause_, kLongestPause);
  }

  // ---- What the store says.

  Seen read_announcements() {
    Seen seen;
    for (int rank = 0; rank < request_.world_size; ++rank) {
      interrupts_.look();
      seen.push_back(board_.announcement(rank));
      if (seen.back() && gone(*seen.back())) fail_gone(rank, *seen.back());
    }
    return seen;
  }

  std::vector<int> unconfirmed() {
    std::vector<int> ranks;
    for (int rank = 1; rank < request_.world_size; ++rank) {
      interrupts_.look();
      if (board_.look(board_.key("confirm", rank)) != roster_.id) ranks.push_back(rank);
    }
    return ranks;
  }

  // ---- What may be wrong.

  // Tells the others, and throws.
  [[noreturn]] void fail(const Error& error) {
    report(error);
    throw error;
  }
  void report(const Error& error) noexcept {
    try {
      board_.write_fault(error);
    } catch (...) {
      // The others have their deadline.
    }
  }
  // What a rank cannot write, the others would wait for.
  void write(const std::string& key, const std::string& value) {
    try {
      store_.set(key, value);
    } catch (const Error& error) {
      leave();  // which may make the room to tell it
      report(Error(error.code(), request_.operation,
                   "rank " + std::to_string(request_.rank) + ": " + error.what()));
      throw;
    }
  }
  [[noreturn]] void fail_gone(int rank, const Announcement& announcement) {
    fail_ended(rank, describe(announcement.process));
  }
  [[noreturn]] void fail_ended(int rank, const std::string& what) {
    fail(Error(ErrorCode::timeout, request_.operation,
               "rank " + std::to_string(rank) + " ended before all ranks had met: " + what,
               {.reason = ErrorReason::peer_gone}));
  }
  [[noreturn]] void fail_absent(const std::string& text) {
    fail(Error(ErrorCode::timeout, request_.operation, text, {.reason = ErrorReason::absent}));
  }

  // Ranks that will not come, and have not been here: an announcement that is there is looked at by
  // itself.
  void check_ended(int first, int last) {
    if (!request_.ended || Deadline::Clock::now() < next_look_) return;
    next_look_ = Deadline::Clock::now() + kLookAtPeers;
    for (int rank = first; rank < last; ++rank) {
      if (rank == request_.rank) continue;
      const std::string what = request_.ended(rank);
      // In this order: what it said before it ended counts, a fault more than anything.
      if (what.empty() || board_.announcement(rank) || read_roster_of_all()) continue;
      board_.look_for_fault();
      fail_ended(rank, what);
    }
  }
  // Rank 0 has received from everybody, and may be through.
  bool read_roster_of_all() {
    return !roster_.id.empty() || !board_.roster(request_.world_size).id.empty();
  }

  void check_values(const std::string& field, const RanksOfValues& ranks_of) {
    if (ranks_of.size() < 2) return;
    fail(Error(ErrorCode::invalid_argument, request_.operation, field, "the same on every rank",
               list_of_values(ranks_of), ErrorReason::arguments_differ));
  }

  // As soon as it shows, since worlds of different sizes never become complete.
  void check_world_size(const Seen& seen) {
    RanksOfValues ranks_of;
    for (int rank = 0; rank < static_cast<int>(seen.size()); ++rank) {
      const auto& announcement = seen[static_cast<std::size_t>(rank)];
      if (!announcement || rank == request_.rank) continue;
      ranks_of[std::to_string(announcement->world_size)].push_back(rank);
    }
    std::vector<int>& same = ranks_of[std::to_string(own_.world_size)];
    same.insert(std::ranges::lower_bound(same, request_.rank), request_.rank);
    check_values("world_size", ranks_of);
  }

  // Every rank compares all, and all find the same difference.
  void check_same() {
    for (const Announcement& announcement : roster_.announcements) {
      for (const auto& [field, value] : announcement.same) {
        check_values(field, ranks_of_values(roster_.announcements, field));
      }
    }
  }

  void check_own_announcement() {
    const auto announcement = board_.announcement(request_.rank);
    if (announcement && announcement->nonce != own_.nonce) {
      fail(two_callers(request_, own_.process, announcement->process));
    }
  }

  [[noreturn]] void give_up(const Seen& seen) {
    // A rank that has just given up is missing in `seen`, but has said why.
    board_.look_for_fault();
    const std::string within = " within " + to_seconds(deadline_.timeout());
    std::vector<int> absent;
    for (std::size_t rank = 0; rank < seen.size(); ++rank) {
      if (!seen[rank]) absent.push_back(static_cast<int>(rank));
    }
    if (!absent.empty()) {
      fail_absent(list_of_ranks(absent) + (absent.size() == 1 ? " has" : " have") + " not arrived" +
                  within);
    }
    // All are there, but somebody does not get on.
    const std::vector<int> waiting = roster_.id.empty() ? std::vector<int>{0} : unconfirmed();
    const int rank = waiting.empty() ? 0 : waiting[0];
    fail_absent("rank " + std::to_string(rank) + " arrived but did not answer" + within + ": " +
                describe(seen[static_cast<std::size_t>(rank)]->process));
  }

  static constexpr std::chrono::nanoseconds kFirstPause = std::chrono::microseconds(100);
  static constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(10);

  Store& store_;
  const AgreementRequest& request_;
  const Deadline& deadline_;
  const Board board_{store_, request_};
  Announcement own_;
  Roster roster_;  // once rank 0 has written it
  std::chrono::nanoseconds pause_ = kFirstPause;
  Deadline::Clock::time_point next_look_ = Deadline::Clock::now() + kLookAtPeers;
  Interrupts interrupts_;
};

// The prefix of an agreement over a transport.
std::string agreement_key(const Transport& transport, std::uint64_t number) {
  return transport.world_id() + "/agreement" + std::to_string(number);
}

}  // namespace

Agreement agree(Store& store, const AgreementRequest& request, const Deadline& deadline) {
  check_request(request);
  return Participant(store, request, deadline).run();
}

void check_agreement(Store& store, const AgreementRequest& request) {
  Board(store, request).look_for_fault();
}

void begin_world(Store& store, AgreementRequest& request) {
  check_request(request);
  const Board worlds(store, request);
  const std::string key = worlds.key("begun", request.rank);
  const ProcessIdentity own = own_process();
  std::int64_t begun = 0;
  ProcessIdentity before = own;
  if (const std::optional<std::string> text = worlds.look(key)) {
    const Sender by = worlds.by("the worlds begun", request.rank);
    std::string_view rest = *text;
    begun = untrusted_number(take_line(rest), by, "number", 1, INT64_MAX - 1);
    before = process_from_text(rest, by);
  }
  const ProcessState state = state_of(before);
  if (before != own && (state == ProcessState::running || state == ProcessState::stopped)) {
    const Error error = two_callers(request, own, before);
    request.prefix = worlds.key(std::to_string(begun));
    Board(store, request).write_fault(error);
    throw error;
  }
  const std::string number = std::to_string(begun + 1);
  store.set(key, number + "\n" + to_text(own));
  request.prefix = worlds.key(number);
}

void end_world(Store& store, const AgreementRequest& request) {
  if (request.rank != 0) return;
  // One by one: a store need not remove what is below a key.
  store.remove(request.prefix + "/roster");
  store.remove(request.prefix + "/go");
  store.remove(request.prefix);
}

Agreement agree(Transport& transport, Store& store, const std::string& operation, Fields same,
                const Deadline& deadline, Fields own) {
  transport.check();
  const std::uint64_t number = transport.next_agreement();
  AgreementRequest request;
  request.operation = operation;
  request.prefix = agreement_key(transport, number);
  request.rank = transport.rank();
  request.world_size = transport.world_size();
  request.same = std::move(same);
  request.same.insert(request.same.begin(), {"transport", transport.name()});
  request.own = std::move(own);
  request.ended = [&](int rank) {
    return transport.peer_gone(rank) ? transport.describe_peer(rank) : std::string();
  };
  Agreement agreement = agree(store, request, deadline);
  // Who has come to this one has left the one before.
  if (request.rank == 0 && number > 0) store.remove(agreement_key(transport, number - 1));
  return agreement;
}

void forget_agreement(Transport& transport, Store& store) {
  if (transport.rank() != 0 || transport.agreements() == 0) return;
  try {
    store.remove(agreement_key(transport, transport.agreements() - 1));
  } catch (const Error&) {
    // It takes a few hundred bytes, and nothing fails for them.
  }
}

}  // namespace winnow::expert_parallel
