// The stream on which an operation queues its work.
#pragma once

namespace winnow {

// On CUDA backends `handle` is a cudaStream_t (null for the default stream), and calls return when
// the work is queued. The CPU backend ignores it and returns when the work is done.
struct Stream {
  void* handle = nullptr;
};

}  // namespace winnow
