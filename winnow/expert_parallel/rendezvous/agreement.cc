// Rank 0 coordinates; agreement_board.h lists the keys.
//
// Two jobs may come to one prefix, so that each rank has two callers, and a rank of one job may
// meet those of the other. Rank 0 writes `world` and then looks for its own announcement; another
// rank 0 announces itself and then looks for `world`. So one of them at least sees the other, and
// tells all; and whoever comes later finds the world that stands.
//
// Nothing that an earlier attempt left can be taken for this one's: a roster counts for a rank only
// with the rank's own nonce, and where rank 0 took an old announcement for a new one, the new one
// has another nonce and a new roster follows.
#include "winnow/expert_parallel/rendezvous/agreement.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/core/version.h"
#include "winnow/expert_parallel/rendezvous/agreement_board.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/transport/fault.h"

namespace winnow::expert_parallel {
namespace {

// A look at the peers' processes costs a few system calls.
constexpr std::chrono::milliseconds kLookAtPeers{20};

bool gone(const Announcement& announcement) {
  return state_of(announcement.process) == ProcessState::gone;
}
bool lives(const ProcessIdentity& process) {
  const ProcessState state = state_of(process);
  return state == ProcessState::running || state == ProcessState::stopped;
}

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
    if (const std::string job = job_id(); !job.empty()) own_.same.emplace_back(kJob, job);
    own_.same.insert(own_.same.end(), request.same.begin(), request.same.end());
    own_.own = request.own;
  }

  Agreement run() {
    try {
      write(board_.announce_key(request_.rank), to_text(own_));
      request_.rank == 0 ? coordinate() : follow();
    } catch (const Error&) {
      leave();
      throw;
    } catch (...) {  // an interrupt
      tell_interrupt();
      leave();
      throw;
    }
    leave();
    Agreement agreement;
    agreement.id = roster_.id;
    agreement.nonce = own_.nonce;
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
      check_ended(0, request_.world_size);
      if (std::all_of(seen.begin(), seen.end(),
                      [](const auto& rank) { return rank.has_value(); }) &&
          !roster_is_of(seen)) {
        roster_.id = random_id();
        roster_.announcements.clear();
        for (const auto& announcement : seen) roster_.announcements.push_back(*announcement);
        write(board_.roster_key(), to_text(roster_));
        check_same();
        pause_ = kFirstPause;
      }
      check_world_before();
      if (!roster_.id.empty() && unconfirmed().empty()) break;
      if (deadline_.expired()) give_up(seen);
    }
    if (look_for_fault()) store_.remove(board_.fault_key());  // of an earlier world
    if (!request_.fresh_prefix) {
      roster_.met = time_of_this_machine();
      write(board_.world_key(), to_text(roster_));
      check_own_announcement();
      look_for_fault();
    }
    write(board_.go_key(), roster_.id);
  }

  void follow() {
    for (;; pause()) {
      look_for_fault();
      check_own_announcement();
      const bool alone = !roster_.id.empty() && gone(roster_.announcements[0]);
      // In this order: what rank 0 wrote before it ended counts, and so does `go` where rank 0 has
      // begun the next agreement already and taken this announcement for one to that.
      Roster found = board_.roster(request_.world_size, request_.rank, own_.nonce);
      if (!roster_.id.empty() && board_.go() == roster_.id) return;
      if (!found.id.empty() && found.id != roster_.id) {
        roster_ = std::move(found);
        check_same();
        write(board_.confirm_key(request_.rank), roster_.id + own_.nonce);
        pause_ = kFirstPause;
        continue;
      }
      if (alone) fail_gone(0, roster_.announcements[0]);
      check_ended(0, 1);
      Seen first(1);
      first[0] = board_.announcement(0);
      check_world_size(first);
      if (deadline_.expired()) give_up(read_announcements());
    }
  }

  // Takes away what this rank has written, unless another process of this rank has replaced it.
  void leave() noexcept {
    try {
      store_.remove(board_.confirm_key(request_.rank));
      const auto announcement = board_.announcement(request_.rank);
      if (announcement && announcement->nonce == own_.nonce) {
        store_.remove(board_.announce_key(request_.rank));
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

  // Of the processes that live: another announcement was left by an earlier world, and the new rank
  // may still come; under a fresh prefix it never will.
  Seen read_announcements() {
    Seen seen;
    for (int rank = 0; rank < request_.world_size; ++rank) {
      auto announcement = board_.announcement(rank);
      if (announcement && gone(*announcement)) {
        if (request_.fresh_prefix) fail_gone(rank, *announcement);
        announcement.reset();
      }
      seen.push_back(std::move(announcement));
    }
    return seen;
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
      if (board_.confirmed(rank) != roster_.id + nonce) ranks.push_back(rank);
    }
    return ranks;
  }

  // ---- What may be wrong.

  bool look_for_fault() { return check_fault(board_, request_, own_.nonce); }

  // Tells the others, and throws.
  [[noreturn]] void fail(const Error& error, bool lasting = false) {
    tell(error, lasting);
    throw error;
  }
  void tell(const Error& error, bool lasting = false) {
    std::vector<std::string> nonces = board_.nonces(request_.world_size);
    nonces.push_back(own_.nonce);
    for (const Announcement& announcement : roster_.announcements) {
      nonces.push_back(announcement.nonce);
    }
    try {
      store_.set(board_.fault_key(), to_fault(error, lasting ? &own_.process : nullptr, nonces));
    } catch (const Error&) {
      std::erase(nonces, own_.nonce);
      board_.go_mute(request_.rank, nonces);
    }
  }
  // What a rank cannot write, the others would wait for.
  void write(const std::string& key, const std::string& value) {
    try {
      store_.set(key, value);
    } catch (const Error& error) {
      leave();  // which may make the room to tell it
      tell(Error(error.code(), request_.operation,
                 "rank " + std::to_string(request_.rank) + ": " + error.what()));
      throw;
    }
  }
  void tell_interrupt() noexcept {
    try {
      tell(Error(ErrorCode::timeout, request_.operation,
                 "rank " + std::to_string(request_.rank) + " was interrupted"));
    } catch (...) {
      // The others have their deadline.
    }
  }
  [[noreturn]] void fail_timeout(const std::string& text) {
    fail(Error(ErrorCode::timeout, request_.operation, text));
  }
  [[noreturn]] void fail_gone(int rank, const Announcement& announcement) {
    fail_ended(rank, describe(announcement.process));
  }
  [[noreturn]] void fail_ended(int rank, const std::string& what) {
    fail_timeout("rank " + std::to_string(rank) + " ended before all ranks had met: " + what);
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
      look_for_fault();
      fail_ended(rank, what);
    }
  }
  // Rank 0 has heard from everybody, and may be through.
  bool read_roster_of_all() {
    return !roster_.id.empty() ||
           !board_.roster(request_.world_size, request_.rank, own_.nonce).id.empty();
  }

  void check_values(const std::string& field, const RanksOfValues& ranks_of) {
    if (ranks_of.size() < 2) return;
    fail(Error(ErrorCode::invalid_argument, request_.operation, field, "the same on every rank",
               list_of_values(ranks_of)),
         field == kWorldSize || field == kJob);
  }

  // As soon as it shows, since worlds of different sizes never become complete.
  void check_world_size(const Seen& seen) {
    RanksOfValues ranks_of;
    for (int rank = 0; rank < static_cast<int>(seen.size()); ++rank) {
      const auto& announcement = seen[static_cast<std::size_t>(rank)];
      if (!announcement || rank == request_.rank || gone(*announcement)) continue;
      ranks_of[std::to_string(announcement->world_size)].push_back(rank);
    }
    std::vector<int>& same = ranks_of[std::to_string(own_.world_size)];
    same.insert(std::lower_bound(same.begin(), same.end(), request_.rank), request_.rank);
    check_values(kWorldSize, ranks_of);
  }

  // Every rank compares all, and all find the same difference.
  void check_same() {
    for (const Announcement& announcement : roster_.announcements) {
      for (const auto& [field, value] : announcement.same) {
        check_values(field, ranks_of_values(roster_.announcements, field));
      }
    }
  }

  // Two processes claim to be a rank: two jobs, or one whose ranks are numbered wrongly. Concerns
  // ranks that come later, too, and a world that may have met ranks of both.
  [[noreturn]] void fail_two_callers(int rank, const ProcessIdentity& one,
                                     const ProcessIdentity& other) {
    const Error error(ErrorCode::invalid_argument, request_.operation, "rank",
                      "one caller as rank " + std::to_string(rank),
                      "two: " + describe(one) + ", and " + describe(other));
    tell(error, true);
    if (!request_.fresh_prefix) tell_world(error);
    throw error;
  }

  // The last world under this prefix, if it is so new that it has not agreed on a layer yet. Where
  // launchers have said which job is theirs, its ranks are known to be of one.
  void tell_world(const Error& error) {
    const Roster world = board_.world();
    for (const Announcement& member : world.announcements) {
      if (names_job(member) || !lives(member.process)) return;
    }
    if (world.id.empty() || world.id == roster_.id) return;
    const AgreementBoard of_world(store_, agreement_key(world.id, 0));
    store_.set(of_world.fault_key(), to_fault(error, nullptr, {}));
  }

  void check_own_announcement() {
    const auto announcement = board_.announcement(request_.rank);
    if (!announcement) {  // another caller has left and taken it for its own
      write(board_.announce_key(request_.rank), to_text(own_));
    } else if (announcement->nonce != own_.nonce) {
      fail_two_callers(request_.rank, own_.process, announcement->process);
    }
  }

  static bool names_job(const Announcement& member) {
    return std::ranges::any_of(member.same, [](const auto& field) { return field.first == kJob; });
  }

  // Where a process of the last world under this prefix lives and is none of the new one, the two
  // are of two jobs, whichever of their ranks have met. So they are where that world is over, but
  // met while a process of the new one was running already, unless launchers have said whose it is.
  void check_world_before() {
    if (request_.fresh_prefix || roster_.id.empty()) return;
    const Roster before = board_.world();
    if (before.id == roster_.id) return;
    const std::vector<Announcement>&now = roster_.announcements, &then = before.announcements;
    const auto stands_in = [](const auto& world, const ProcessIdentity& process) {
      return std::ranges::find(world, process, &Announcement::process) != world.end();
    };
    for (std::size_t rank = 0; rank < then.size(); ++rank) {
      const ProcessIdentity& process = then[rank].process;
      if (!lives(process) || stands_in(now, process)) continue;
      fail_two_callers(int(rank), now[std::min(rank, now.size() - 1)].process, process);
    }
    for (std::size_t rank = 0; rank < now.size() && !then.empty(); ++rank) {
      const ProcessIdentity& process = now[rank].process;
      const bool was_there = process.start_time != 0 && process.start_time < before.met &&
                             process.boot == then[0].process.boot;
      if (!was_there || names_job(now[rank]) || stands_in(then, process)) continue;
      fail_two_callers(int(rank), process, then[std::min(rank, then.size() - 1)].process);
    }
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

  static constexpr const char *kWorldSize = "world_size", *kJob = "job";
  static constexpr std::chrono::nanoseconds kFirstPause = std::chrono::microseconds(100);
  static constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(10);

  Store& store_;
  const AgreementRequest& request_;
  const Deadline& deadline_;
  const AgreementBoard board_{store_, request_.prefix};
  Announcement own_;
  Roster roster_;  // the last one in which this rank stands
  std::chrono::nanoseconds pause_ = kFirstPause;
  Deadline::Clock::time_point next_look_ = Deadline::Clock::now() + kLookAtPeers;
  Interrupts interrupts_;
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

void check_agreement(Store& store, const AgreementRequest& request, const Agreement& agreement) {
  check_fault(AgreementBoard(store, request.prefix), request, agreement.nonce);
}

}  // namespace winnow::expert_parallel
