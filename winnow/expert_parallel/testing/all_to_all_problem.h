// The problems that the case table, the tests and the soak of the all-to-all share: the inputs of
// every rank from a seed, and what the oracle expects. all_to_all_check.h runs them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/all_to_all/all_to_all_oracle.h"
#include "winnow/expert_parallel/testing/expert_choice.h"

namespace winnow::expert_parallel {

enum class Tokens { full, uneven, even_ranks_empty, none };
enum class Scatter { none, slice, table };
enum class ExpertRows { combine_buffer, in_place, own };  // where the experts write
enum class Mode { counted, cached, worst_case };

struct Problem {
  std::string name{};
  DType dtype = DType::bf16, weight_dtype = DType::f32;
  int nodes = 1, local_world_size = 4, experts_per_rank = 3, topk = 2;
  std::int64_t max_tokens = 12, hidden = 32, alignment = 1, arena_rows = 0;
  Tokens tokens = Tokens::uneven;
  ExpertChoice choice = ExpertChoice::distinct;
  Scatter scatter = Scatter::none;
  Mode mode = Mode::counted;
  ExpertRows expert_rows = ExpertRows::combine_buffer;
  bool token_major = false, local_combine = false, weights = false, weighted_combine = false;
  bool fp8 = false, bias = false, copy_out = false, out = false;
  bool strided = false;       // the caller's tensors have rows further apart
  bool wide_indices = false;  // i64
  bool in_flight = false;     // all dispatches first, then the combines in the opposite order
  // What combine gets: a second bias; weights of its own; values of pairs, with rows and alone.
  bool second_bias = false, combine_weights = false, pair_values = false, add_values = false;
  DType scale_dtype = DType::f32;
  std::int64_t scale_columns = 0;  // 0: one for 128 columns
  bool scales_by_column = false;
  int rounds = 2, sm_count = Config{}.sm_count;
  std::uint64_t seed = 0;

  int world_size() const { return nodes * local_world_size; }
  int experts() const { return world_size() * experts_per_rank; }
  Config config() const;
};

std::string describe(const Problem& problem);

// One call of dispatch and one of combine, of all ranks.
struct Round {
  struct Rank {
    Tensor input, expert_indices, weights, scales, scatter, bias, second_bias, combine_weights;
    Tensor expert_output;  // [R, H]
    Tensor pair_values;    // [R, 1], token-major [R, K]
    Tensor combined;       // [n, H]: what the oracle expects
    Tensor values;         // [n, K]: the same
  };
  std::vector<Rank> ranks;
  Tensor scatter_table;  // [sum of n, K], or absent
  oracle::World world;
  std::vector<std::vector<oracle::Row>> rows;

  std::int64_t most_rows() const;  // of any rank
};

// `routing_seed` determines tokens, experts and scatter indices; `payload_seed` determines rows,
// weights and the like.
Round make_round(const Problem& problem, std::uint64_t routing_seed, std::uint64_t payload_seed);

// The rounds of a problem. Cached rounds repeat the routing of the first with other payloads.
std::vector<Round> make_rounds(const Problem& problem);

}  // namespace winnow::expert_parallel
