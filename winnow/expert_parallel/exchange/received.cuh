// What the exchange of a call has received from each rank. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/view.cuh"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"

namespace winnow::expert_parallel {

class Received {
 public:
  __device__ explicit Received(const LayerView& view) : Received(view, epoch_of(view)) {}
  __device__ Received(const LayerView& view, std::uint64_t epoch)
      : rows_(view.control.local + view.control_layout.row(epoch, view.topology.world, 0)),
        row_bytes_(view.control_layout.row_bytes),
        world_(view.topology.world),
        experts_(view.topology.experts) {}
  __device__ const Header& header(int rank) const {
    return *reinterpret_cast<const Header*>(rows_ + rank * row_bytes_);
  }
  // A dispatch of new indices that was not refused has these behind its header.
  __device__ const std::int32_t* pairs(int rank) const {  // [E]
    return reinterpret_cast<const std::int32_t*>(&header(rank) + 1);
  }
  __device__ const std::int32_t* tokens(int rank) const { return pairs(rank) + experts_; }  // [W]
  __device__ Findings findings(int rank) const {  // none of other calls
    const Findings findings = *reinterpret_cast<const Findings*>(tokens(rank) + world_);
    const Header& message = header(rank);
    const bool there = (message.options.call == Call::dispatch) & (message.refusal == 0);
    return there ? findings : Findings{};
  }

 private:
  const std::byte* rows_;
  std::int64_t row_bytes_;
  int world_, experts_;
};

// Of a header without its text, which stands at its end, and which only a refusal has.
inline constexpr std::int64_t kHeadBytes = sizeof(Header) - Header::kTextBytes;

// Copies what the exchange of this call has received. The whole block; ends with a barrier.
__device__ inline void report_received(const LayerView& view, const ReportView& to,
                                       bool with_texts) {
  using Word = std::uint64_t;
  const Received received(view);
  const int world = view.topology.world;
  const int words = int((with_texts ? std::int64_t(sizeof(Header)) : kHeadBytes) / sizeof(Word));
  for (int i = threadIdx.x; i < world * words; i += blockDim.x) {
    const int rank = i / words, word = i % words;
    reinterpret_cast<Word*>(to.headers + rank)[word] =
        reinterpret_cast<const Word*>(&received.header(rank))[word];
  }
  for (int rank = threadIdx.x; rank < world; rank += blockDim.x) {
    to.findings[rank] = received.findings(rank);
  }
  __syncthreads();
}

}  // namespace winnow::expert_parallel
