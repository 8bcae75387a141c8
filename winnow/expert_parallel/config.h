// The configuration of an expert-parallel layer, the same on every rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/device.h"
#include "winnow/core/dtype.h"

namespace winnow::expert_parallel {

// How the rows of a dispatch are ordered; see AllToAll::dispatch().
enum class RowOrder : std::uint8_t {
  expert_major,  // one row per (token, expert) pair
  token_major,   // one row per token that has an expert here
};

inline constexpr std::int64_t kMaxTopk = 32;  // experts of a token

// The fixed sizes of a layer. Every rank must pass the same values; the constructor compares them.
// W is the transport's world size, rank r lives on node r / local_world_size, expert
// x on rank x / (experts / W). Largest values: max_tokens (2^31 - 1) / 32, hidden 2^24; on a GPU
// W * max_tokens 2^31 - 1 and local_world_size 72.
struct Config {
  std::int64_t max_tokens = 0;        // T: limit of the tokens that one rank dispatches; 1 or more
  std::int64_t hidden = 0;            // H: elements of a row; H * size of dtype a multiple of 16
  int topk = 0;                       // K: experts per token, 1 to 32
  int experts = 0;                    // E: a multiple of W
  DType dtype = DType::bf16;          // of rows: bf16, f16 or f32; dispatch takes f8_e4m3 too
  DType weight_dtype = DType::f32;    // of routing weights: f32, bf16 or f16
  int local_world_size = 0;           // L: ranks per node, a divisor of W; 0: all, one node
  bool enable_local_combine = false;  // see combine()
  int sm_count = 20;                  // limit of the SMs that a GPU layer uses
  // The arena initially has room for a dispatch of this many rows and its combine_buffer(). 0 means
  // the number of rows that fill 64 MiB, at most 2 * max_tokens * topk.
  std::int64_t arena_rows = 0;
  std::chrono::nanoseconds timeout{0};  // of every wait; 0: default_timeout() of deadline.h
  Device device{};  // of tensors and arena: the CPU, or a GPU, whose index may differ by rank
  // Forces a backend as RunOptions::backend does: cpu, or cuda on GPUs of compute capability 9.0
  // and newer. Absent: that of the device, or of the environment variable WINNOW_BACKEND.
  std::optional<Backend> backend{};
};

}  // namespace winnow::expert_parallel
