// How every call begins: each rank tells all others what it wants, and all of them decide alike.
// Internal.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/communicator.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

enum class Call : std::int64_t {
  dispatch,
  cached_dispatch,
  scatter_rows,
  scatter_check,
  combine,
  notify
};

// What must be the same on every rank. Numbers all, so that one loop compares them.
struct Options {
  Call call = Call::dispatch;
  std::int64_t order = 0, expert_alignment = 1, worst_case_rows = 0;
  std::int64_t input = 0;                                                     // DType
  std::int64_t weights = 0, scatter_indices = 0, copy_out = 0, weighted = 0;  // 0 or 1
  std::int64_t cached = 0, descriptor = 0;  // the number of the dispatch that is repeated, combined
  std::int64_t channels = 0;                // of notify
  std::int64_t scale_bytes = 0;             // of a row of dispatch; 0: no scales
  std::int64_t pair_values = 0;             // of combine; 2: they travel without rows
  std::int64_t add_values = 0;              // 0 or 1
  std::int64_t pair_columns = 0;
  std::int64_t sm_count = 0;  // of this call
  // On GPUs, in calls for which the host does not wait: a digest of the regions that were reserved
  // since all ranks learned of the free extents. 0: they learn of them in this call.
  std::int64_t regions = 0;
};

// What a rank posts, in memory that others read.
struct Header {
  static constexpr std::size_t kTextBytes = 640;

  std::uint32_t refusal = 0;   // ErrorCode + 1 of what this rank finds wrong; 0: nothing
  std::uint32_t deferred = 0;  // 1: the call goes on and the next one fails
  std::int32_t subject = -1;   // the rank at fault; -1: the rank that reports it
  std::uint32_t counts = 0;    // how many counts follow the header; CPU only
  Options options;
  std::int64_t tokens = 0;        // n
  std::int64_t scatter_rows = 0;  // of the table that was given
  std::int64_t out_rows = -1;     // dispatch: of `out`; -1: none was given
  std::uint64_t releasable = 0;   // Arena::releasable()
  Extent rows;    // dispatch: the free extent that rows may use; combine: the expert rows
  Extent values;  // combine: the values of the rows' pairs
  char text[kTextBytes] = {};  // what is wrong

  void refuse(const Error& error);
  // Runs `step`; an exception becomes the refusal of this rank, since the other ranks wait for it.
  template <class Step>
  void refuse_what_throws(std::string_view operation, const Step& step) {
    try {
      step();
    } catch (const Error& error) {
      refuse(error);
    } catch (const std::bad_alloc&) {
      refuse({ErrorCode::resource, std::string(operation), "out of memory in the call"});
    }
  }
  // "rank 1: input: want ...", said by `rank`. Bounded, whatever the memory holds.
  std::string message(int rank) const;
};
static_assert(std::is_trivially_copyable_v<Header>);
// The bounds of what a rank may post.
struct HeaderBounds {
  std::int64_t world = 1, tokens = 0, counts = 0;  // counts: in a row
};
// For Untrusted<Header>: checks all but the extents, which depend on the arena.
void check_bounds(const Header& header, const Sender& by, const HeaderBounds& bounds);

// GPUs copy what stands before the text, and behind the header, in words of 16 bytes.
static_assert(sizeof(Header) % 16 == 0 && Header::kTextBytes % 16 == 0);

// The mailboxes of one rank. They hold two epochs: a rank posts epoch e + 1 when it has received
// epoch e from all, and e + 2 only when all have posted e + 1, hence have read everything of e. So
// nothing is ever cleared, and a message says by its epoch which call it belongs to.
class Exchange {
 public:
  // Collective. `table_bytes`: the largest table that run() is given. `max_tokens`: of a rank.
  // `deadline` is that of the constructor; every run() has as much time.
  Exchange(Communicator& communicator, const ExpertMap& map, std::int64_t max_tokens,
           std::int64_t table_bytes, const Deadline& deadline);

  // Posts header and counts (absent: null) to every rank, and `table` to this rank's rail peers;
  // then receives from all. One message to each other node, whose receiver passes header and counts
  // on to the ranks of its node. `phase` is what errors say was waited for.
  void run(std::uint64_t epoch, std::string_view operation, std::string_view phase, Header header,
           const PairCounts* counts, std::span<const std::byte> table);

  // What run() received, within its bounds, in memory of this rank alone; valid until the next
  // run().
  const Header& header(int rank) const;
  // The counts of all ranks, in a call in which every rank posts counts.
  WorldCounts counts() const;
  // Copies a part of the table of the rail source on another node, which may hold anything.
  void copy_table(int node, std::size_t offset, void* to, std::size_t bytes) const;
  // Names a rank in errors about what else it has said in this call.
  Sender sender(int rank) const { return {operation_, phase_, rank}; }

  // throw_refusals() of the headers that were received.
  void throw_refusals(std::string_view operation) const;

 private:
  void post(const Header& header, const PairCounts* counts, std::span<const std::byte> table);
  void pass_on(const Deadline& deadline, const WaitName& name);
  void receive(const Deadline& deadline, WaitName name);
  void take(int rank);
  HeaderBounds bounds() const;

  std::size_t received_signal(int rank) const;
  std::size_t rail_signal(int node) const;
  std::size_t received_offset(int rank) const;  // of a row, in the mailbox of every rank
  std::size_t rail_offset(int node) const;      // of a row and a table, in that of the rail peers

  Communicator& communicator_;
  ExpertMap map_;
  std::int64_t max_tokens_;
  std::chrono::nanoseconds timeout_;
  std::uint64_t epoch_ = 0;
  std::string operation_, phase_;  // of the last run()
  std::size_t row_bytes_ = 0, table_bytes_ = 0, signal_bytes_ = 0;
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<std::byte> message_;   // header, counts and table as they travel
  std::vector<std::byte> received_;  // [W] rows
};

// Throws the same error on every rank that received the same headers: the refusal of the lowest
// rank that refuses, else the first option in which ranks differ.
void throw_refusals(std::string_view operation, std::span<const Header* const> received);
void throw_refusals(std::string_view operation, std::span<const Header> received);

}  // namespace winnow::expert_parallel
