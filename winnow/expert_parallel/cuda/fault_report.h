// The text of an error for a wait of a kernel that has expired. Internal.
#pragma once

#include <span>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/transport/fault.h"
#include "winnow/expert_parallel/transport/fault_notice.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// As Communicator words its own: "rank 0 waited 30.0 s for the counts of rank 2 (epoch 7, seen 6):
// thread, running". `texts` name the phases.
FaultRecord fault_record(const FaultReport& report, std::span<const PhaseText> texts,
                         const Transport& transport);

}  // namespace winnow::expert_parallel
