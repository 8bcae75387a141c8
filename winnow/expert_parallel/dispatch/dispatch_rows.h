// How the rows of a dispatch lie in a rank's region of the arena, and how a token's are written.
// Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "winnow/expert_parallel/dispatch/dispatch_request.h"
#include "winnow/expert_parallel/routing/tables.h"
#include "winnow/expert_parallel/transport/untrusted.h"

namespace winnow::expert_parallel {

// The tables of a region, one after the other; the payload is the first. Sizes are those of a row,
// 0 where there is no such table.
struct RegionLayout {
  std::int64_t payload_bytes = 0;  // of a row of the output
  std::int64_t weight_bytes = 0;   // of a pair (expert-major) or of topk pairs (token-major)
  std::int64_t scale_bytes = 0;
  std::int64_t id_bytes = 0;
  std::int64_t source_bytes = 0;
  std::int64_t owner_bytes = 0;  // of the word by which a pair claims a row; scatter_indices
  std::int64_t value_bytes = 0;  // pair_values of combine; 0 without copy_out, see CombineRoom
  std::int64_t weights = 0, scales = 0, ids = 0, sources = 0, owners = 0, values = 0;  // offsets
  std::int64_t bytes = 0;                                                              // of all

  // The layout of `rows` rows. With copy_out the payload is large enough for the rows of the output
  // and for those of combine_buffer(), which later take their place.
  RegionLayout(const Config& config, const Request& request, std::int64_t rows);
};

// What follows the tables in a region without copy_out: combine_buffer(), and the values of its
// pairs.
struct CombineRoom {
  std::int64_t values = 0;  // offset
  std::int64_t bytes = 0;   // of both; 0 with copy_out

  CombineRoom(const Config& config, const Request& request, std::int64_t rows);
};

// The tables of one rank of this node, whose region begins at `data`.
struct RegionTables {
  std::byte* payload = nullptr;
  std::byte* weights = nullptr;  // null where there is no such table
  std::byte* scales = nullptr;
  Untrusted<std::int32_t>* ids = nullptr;
  Untrusted<RowSource>* sources = nullptr;
  std::uint64_t* owners = nullptr;

  RegionTables(std::byte* data, const RegionLayout& layout);
};

// For Untrusted<RowSource>: the source is padding, or its rank, k and first are in bounds, as
// find_copies() requires.
void check_bounds(const RowSource& source, const Sender& by, std::int64_t world, std::int64_t rows,
                  std::int64_t topk);

// A token that is to be written.
struct TokenRecord {
  int source = 0;  // rank
  std::int64_t token = 0;
  const std::byte* payload = nullptr;
  const std::byte* scales = nullptr;
  const std::byte* weights = nullptr;     // of its topk pairs
  const std::int32_t* experts = nullptr;  // [K]
  const std::int32_t* rows = nullptr;     // [K], -1: not on this node
};

// Writes tokens to the ranks of this node.
class RowWriter {
 public:
  RowWriter(const Layer& layer, const Request& request, const RegionLayout& sizes,
            std::vector<RegionTables> ranks);  // [L]
  const RegionTables& rank(int local) const { return ranks_[static_cast<std::size_t>(local)]; }

  // Writes each row of the token straight to its place.
  void write(const TokenRecord& token) const;

  // Clears the rows of rank `local` that no token has: the padding after each expert's rows and,
  // with worst_case_rows, the rows after the last one, but these without payload and scales.
  void write_padding(const Routing& routing, int local) const;

 private:
  void write_pairs(const TokenRecord& token, const int* locals) const;
  void write_token(const TokenRecord& token, const int* locals) const;
  void write_payload(const TokenRecord& token, const RegionTables& to, std::int64_t row) const;
  void clear_row(const RegionTables& to, std::int64_t row) const;

  ExpertMap map_;
  int first_rank_;  // of this node
  RowOrder order_;
  RegionLayout sizes_;
  std::vector<RegionTables> ranks_;
};

}  // namespace winnow::expert_parallel
