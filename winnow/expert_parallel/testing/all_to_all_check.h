// Runs the problems of all_to_all_problem.h and compares with the oracle, bit for bit.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "winnow/core/backend.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/testing/all_to_all_problem.h"
#include "winnow/expert_parallel/testing/comparisons.h"
#include "winnow/expert_parallel/testing/rank_device.h"

namespace winnow::expert_parallel {

// One call of one rank, checked against the oracle: every output and every field of the descriptor,
// bit for bit. The call gets copies of the round's tensors at `place`, the layer's device, which
// are overwritten after it.
Dispatched dispatch_and_check(AllToAll& layer, const RankDevice& place, const Problem& problem,
                              const Round& round, int rank,
                              std::shared_ptr<const Descriptor> cached, Comparisons& comparisons);
void check_dispatched(const RankDevice& place, const Problem& problem, const Round& round, int rank,
                      const Dispatched& got, Comparisons& comparisons);
void combine_and_check(AllToAll& layer, const RankDevice& place, const Problem& problem,
                       const Round& round, int rank, const Dispatched& got,
                       Comparisons& comparisons);

// All rounds of the problem, of one rank.
Comparisons run_rank(AllToAll& layer, const Problem& problem, const std::vector<Round>& rounds);

// The whole problem with every rank a thread of this process, all on one device. `backend` forces
// one.
Comparisons run_in_process(const Problem& problem, Device device = {},
                           std::optional<Backend> backend = {});
// What this process does as one rank of a launched world (rendezvous/launch_environment.h): `part`
// gets the rank's transport, the ranks' store and its device, on GPUs each rank its own. Rank 0
// returns the comparisons of all ranks, the others their own.
using RankPart = std::function<Comparisons(const std::shared_ptr<Transport>& transport,
                                           const std::shared_ptr<Store>& store, Device device)>;
Comparisons run_launched(DeviceType type, const RankPart& part);

}  // namespace winnow::expert_parallel
