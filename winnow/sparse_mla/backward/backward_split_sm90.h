// Backward of top-k sparse MLA attention on sm90 through P and dS in memory, for many heads.
// Internal.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_joint_sm90.h"

namespace winnow::sparse_mla {

// Bytes of device memory that backward_split_sm90() works in.
std::int64_t backward_split_workspace_bytes(const JointParams& params);

// `workspace` is aligned to 256 bytes.
void backward_split_sm90(const JointParams& params, void* workspace, void* stream);

}  // namespace winnow::sparse_mla
