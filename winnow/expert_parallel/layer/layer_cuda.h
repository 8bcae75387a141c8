// One rank's layer on a GPU, host side: what dispatch and combine share. The counterpart of Layer
// (layer.h). Only in builds with CUDA. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/core/device.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/cuda/calls.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wire.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"
#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/transport/fault_notice.h"

namespace winnow::expert_parallel {

// Bytes between the rows of a tensor; 0 if the tensor is absent.
inline std::int64_t row_stride(const ConstTensorView& view) {
  return view.present() ? view.stride(0) * size_of(view.dtype()) : 0;
}

// What the host learns of a call.
enum class Report {
  none,     // nothing: it does not wait
  later,    // what the exchange has heard, when the next call asks: learn_offered()
  headers,  // the same at once: it waits
  more,     // and what a later kernel of the call adds before it calls complete()
};

// What the layer must know of each of its operations.
struct CudaOperation {
  int (*load)() = nullptr;           // its kernels, onto the current GPU; a cudaError_t
  std::span<const PhaseText> texts;  // of what its kernels wait for
};

class CudaLayer {
 public:
  // Collective. `config` is checked and resolved; config.device is a GPU. Errors (winnow::Error):
  // unsupported, if the GPU or the transport cannot do it; those of the allocations. The
  // destructor does not wait.
  CudaLayer(std::shared_ptr<Transport> transport, const Config& config,
            std::span<const CudaOperation> operations);
  CudaLayer(const CudaLayer&) = delete;
  CudaLayer& operator=(const CudaLayer&) = delete;

  const Config& config() const { return config_; }
  const ExpertMap& map() const { return map_; }
  Device device() const { return config_.device; }
  int rank() const { return rank_; }
  int node() const { return map_.topology.node(rank_); }
  int local() const { return map_.topology.local(rank_); }
  int nodes() const { return map_.topology.nodes(); }
  std::int64_t row_bytes() const { return config_.hidden * size_of(config_.dtype); }
  // At most config.sm_count, and so few that the blocks of all ranks on this GPU run side by side.
  // In a call at most as many as it asked for.
  int blocks() const { return call_blocks_; }
  // Whether other ranks use this GPU, too.
  bool shares_gpu() const { return calls_.shares_gpu(); }
  // pushes_rows() of layouts.h, but where all ranks share one GPU there are no links: then only
  // enable_local_combine makes them push.
  bool pushes_rows(std::int64_t tokens) const;
  // Represents this layer in descriptors, which must not keep the rest of it alive.
  const std::shared_ptr<const char>& identity() const { return identity_; }
  const LayerView& view() const { return view_; }
  const Wire& wire() const { return *wire_; }
  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }

  // The same memory in every call, of [NN, T, K] floats and as many behind them: a combine's
  // weights.
  float* combine_weights();
  // Memory of this GPU that only this rank uses; it may be used again by later calls, in their
  // order, when the last owner lets go. Never null. Where there is none: Error (resource), which
  // after the exchange of a call breaks the layer on every rank.
  std::shared_ptr<Region> keep(std::int64_t bytes);

  // ---- A call, in this order on every rank, as the body of CudaCalls::run().

  template <class Body>
  auto call(const Body& body) {
    return calls_.run(body);
  }

  // Throws what broke the layer. Orders `stream` after the stream of the call before. The number of
  // the call, the same on every rank.
  // `sm_count`: of the call, which may not have been checked; 0: the layer's.
  std::uint64_t begin(std::string_view operation, Stream stream, int sm_count = 0);
  cudaStream_t stream() const { return calls_.stream(); }
  bool capturing() const { return calls_.capturing(); }

  // Enqueues the exchange: posts header, counts ([E + W] i32 and Findings behind them, in device
  // memory; null: none) and table (device memory, to the rail peers; stays as it is until the call
  // is over), hears all ranks, and makes the rest of the call do nothing where one refuses or
  // options differ. A rank whose header refuses enqueues nothing else and calls wait_report().
  // Errors name `phase` where a rank does not come.
  void exchange(Phase phase, const Header& header, const std::int32_t* counts,
                const std::byte* table, std::int64_t table_bytes, Report report);
  // The host waits until the report is complete, then throws faults and refusals, alike on every
  // rank. In capture: throws what this rank's own header refused.
  void wait_report();
  // What was heard, after wait_report().
  const Header& heard_header(int rank) const { return host_report_.headers[rank]; }
  std::span<const std::int32_t> report_words() const { return {host_report_.words, report_words_}; }

  // Behind rail_send and what may run while its puts are under way: enqueues the wait for them.
  void quiet();

  // After everything is enqueued: throws the errors that earlier calls left for this one (faults,
  // refusals and overflows of calls for which the host did not wait).
  void end();
  // Throws Error (internal or resource) if something was not enqueued, and breaks the layer.
  void check(int cuda_error, const char* what) { calls_.check(cuda_error, what); }
  void wait_for_stream(const char* what) { calls_.wait_for_stream(what); }

  // This rank alone has no memory in the middle of a call: breaks the layer on every rank.
  [[noreturn]] void fail_without_memory() { calls_.fail_without_memory(); }

  // ---- Regions of the arena, decided alike on every rank. Each rank's largest hole is known from
  // the headers of some exchange before; later calls take from its front.

  // `bytes` [W]: what each rank needs. False: not every hole is known to be so large.
  bool fits(std::span<const std::int64_t> bytes) const;
  // What to do where they do not fit. The headers of the last call that had its report `later` tell
  // of other holes; where that does not help, those of this one, for which the host waits. In
  // capture, where it cannot, throws (invalid_argument: a larger arena_rows is wanted).
  void learn_offered(std::span<const std::int64_t> bytes);
  void offer_hole(Header& header) const;  // Header::rows and releasable
  void learn_holes();                     // after wait_report(): what all ranks have offered
  // After learn_holes() in a call that has reserved before its exchange: lets go of the segments
  // that all ranks can do without.
  void release_learned() { arena_.release(std::exchange(releasable_, 0)); }
  // Where the regions lie, by rank. The caller takes its own from arena(). Grows the arena where a
  // hole is too small: only after learn_holes() in the same call; collective. Then by `room` bytes
  // rather than by what is needed, unless that were more than twice as much.
  std::vector<Extent> reserve(std::span<const std::int64_t> bytes, std::int64_t room = 0);
  // The regions' beginnings at the ranks of this node, as `extents` [W] say.
  NodePointers node_pointers(std::span<const Extent> extents) const;

  // Enqueues a wait for all ranks (of this node).
  void barrier(bool node_only, Stream stream);

 private:
  void load_kernels(std::span<const CudaOperation> operations);
  std::shared_ptr<SymmetricMemory> allocate(std::int64_t bytes, std::string_view what);
  NodePointers node_pointers_of(SymmetricMemory& memory) const;
  SymmetricView view_of(SymmetricMemory& memory, std::byte** pointers) const;
  std::size_t pointers_bytes() const;  // of the pointers to a memory's ranks
  void make_reports();
  std::byte** segment_row(std::int64_t segment) const;
  void throw_deferred();
  void throw_heard(const ReportView& heard, bool deferred, std::uint64_t call);
  std::vector<Header> refusals(const ReportView& heard, bool deferred) const;
  void read_offer();
  void forget_offer();

  Config config_;
  ExpertMap map_;
  std::shared_ptr<Transport> transport_;
  const Wire* wire_;
  int rank_, blocks_ = 1;
  int call_blocks_ = 1, call_sm_count_ = 1;  // of this call
  bool world_is_one_gpu_ = false;
  std::shared_ptr<const char> identity_ = std::make_shared<const char>('\0');

  std::shared_ptr<std::byte> private_;  // CudaState and tables of pointers
  std::byte** segments_ = nullptr;
  std::shared_ptr<SymmetricMemory> control_, rail_, pushed_;
  Arena arena_, own_;
  std::shared_ptr<Region> combine_weights_;
  // What all ranks offered in a call: [W] holes, and segments that all can do without.
  struct Offer {
    std::uint64_t call = 0;
    std::vector<Extent> holes;
    std::uint64_t releasable = 0;
  };
  Offer heard_offer(std::uint64_t call) const;
  std::vector<Extent> holes_;  // [W], what is left of them
  std::uint64_t learned_ = 0;  // the call in which they were offered
  // On every rank, until reserve(). Not of an offer: a rank that refuses the call would keep them.
  std::uint64_t releasable_ = 0;
  std::uint64_t offered_ = 0;   // the call whose report, asked for later, is still to be read
  std::optional<Offer> offer_;  // of the last such call, read and not used yet
  bool fresh_holes_ = false;    // learned in this call
  bool reserved_ = false;       // in this call
  // A mark of the extents that were reserved since holes were learned. Ranks compare it: one that
  // refused a call that the others have made, or made it with other sizes, takes other memory for
  // free than they do, and the holes have to be learned again.
  std::uint64_t regions_ = 0;
  ReportView host_report_, host_deferred_;
  std::size_t report_words_ = 0;
  LayerView view_;
  Header own_header_;          // of this call
  bool others_go_on_ = false;  // they are through the exchange of this call, as this rank is
  CudaCalls calls_;  // the last member: all of the above goes when the last call has ended
};

}  // namespace winnow::expert_parallel
