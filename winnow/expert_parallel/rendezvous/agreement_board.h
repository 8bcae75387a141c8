// What the ranks of one agreement write into the store and read from it. Keys under the prefix:
//
//   announce/R   rank R: a nonce, its process, its fields
//   roster       rank 0: an id and all announcements, once all have come
//   confirm/R    rank R: that id, once it has found its own nonce in the roster and no difference
//   world        rank 0: the roster, once all have confirmed it; stays, unless the prefix is fresh
//   go           rank 0: that id, last
//   fault        any rank that gives up: the reason, and the ranks that it concerns
//   mute/N       any rank that gives up and cannot write why, for the rank whose nonce is N:
//   without
//                a value, which needs no space where a disk is full; mute/N/R where it is rank R
//
// Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/rendezvous/announcement.h"

namespace winnow::expert_parallel {

// The prefix of an agreement over a transport.
std::string agreement_key(const std::string& world_id, std::uint64_t number);

class AgreementBoard {
 public:
  AgreementBoard(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}

  std::string announce_key(int rank) const { return key("announce/" + std::to_string(rank)); }
  std::string confirm_key(int rank) const { return key("confirm/" + std::to_string(rank)); }
  std::string roster_key() const { return key("roster"); }
  std::string world_key() const { return key("world"); }
  std::string go_key() const { return key("go"); }
  std::string fault_key() const { return key("fault"); }
  std::string mute_key(const std::string& nonce) const { return key("mute/" + nonce); }

  // None of these wait. Each returns nothing where there is no such key, or no such text in it.
  std::optional<Announcement> announcement(int rank) const;
  // Empty unless it has `world_size` ranks and this rank stands in it with that nonce.
  Roster roster(int world_size, int rank, const std::string& nonce) const;
  std::optional<std::string> confirmed(int rank) const { return look(confirm_key(rank)); }
  Roster world() const;
  std::optional<std::string> go() const { return look(go_key()); }
  std::optional<std::string> fault() const { return look(fault_key()); }
  // A rank that has gone mute for the one with that nonce; the keys go.
  std::optional<int> take_mute(const std::string& nonce, int world_size) const;
  // For the ranks with these nonces. May fail as all writing does: they have their deadline.
  void go_mute(int rank, const std::vector<std::string>& nonces) const noexcept;
  // Of the ranks that have announced themselves.
  std::vector<std::string> nonces(int world_size) const;

 private:
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }
  std::optional<std::string> look(const std::string& key) const;

  Store& store_;
  std::string prefix_;
};

// The text of a fault. `writer` is null, or the process whose fault lasts: it concerns every later
// rank while that process lives. `nonces` are those of the ranks that the writer has seen.
std::string to_fault(const Error& error, const ProcessIdentity* writer,
                     const std::vector<std::string>& nonces);
// Throws the fault on the board if it concerns the rank with that nonce: if its writer has seen the
// rank, if it lasts, or if the prefix is fresh. Returns whether there is one that does not. A rank
// that has gone mute is a fault, too.
bool check_fault(const AgreementBoard& board, const AgreementRequest& request,
                 const std::string& nonce);

}  // namespace winnow::expert_parallel
