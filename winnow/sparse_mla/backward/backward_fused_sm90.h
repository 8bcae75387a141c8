// Backward of top-k sparse MLA attention on sm90 in one kernel, 64 heads at a time. Internal.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_joint_sm90.h"

namespace winnow::sparse_mla {

// Bytes of device memory that backward_fused_sm90() works in. Both want what the checks for
// sm90 ask for.
std::int64_t backward_fused_workspace_bytes(const JointParams& params);

// `workspace` is aligned to 256 bytes. Not deterministic.
void backward_fused_sm90(const JointParams& params, void* workspace, void* stream);

}  // namespace winnow::sparse_mla
