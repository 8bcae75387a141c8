// Backward of top-k sparse MLA attention on sm90 through P and dS in memory, for many heads.
// Internal.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_impl.h"

namespace winnow::sparse_mla {

// Bytes of device memory that backward_split_sm90() works in.
std::int64_t backward_split_workspace_bytes(const BackwardParams& params);

// `workspace` is aligned to 256 bytes.
void backward_split_sm90(const BackwardParams& params, void* workspace, void* stream);

}  // namespace winnow::sparse_mla
