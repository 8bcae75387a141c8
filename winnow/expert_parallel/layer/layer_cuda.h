// One rank's layer on a GPU, host side: what dispatch and combine share. The counterpart of Layer
// (layer.h). Only in builds with CUDA. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/cuda/calls.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/layer/handshake_cuda.h"
#include "winnow/expert_parallel/layer/place.h"
#include "winnow/expert_parallel/layer/regions.h"
#include "winnow/expert_parallel/memory/cuda_memory.h"
#include "winnow/expert_parallel/memory/own_memory.h"

namespace winnow::expert_parallel {

// Bytes between the rows of a tensor; 0 if the tensor is absent.
inline std::int64_t row_stride(const ConstTensorView& view) {
  return view.present() ? view.stride(0) * size_of(view.dtype()) : 0;
}

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

  const Place& place() const { return place_; }
  const LayerView& view() const { return view_; }
  Regions& regions() { return regions_; }
  const Regions& regions() const { return regions_; }
  CudaCalls& calls() { return calls_; }
  Handshake& handshake() { return *handshake_; }
  // Represents this layer in descriptors, which must not keep the rest of it alive.
  const std::shared_ptr<const char>& identity() const { return identity_; }

  // At most config.sm_count, and so few that the blocks of all ranks on this GPU run side by side.
  // In a call at most as many as it asked for.
  int blocks() const { return call_blocks_; }
  // pushes_rows() of layouts.h, but where all ranks share one GPU there are no links: then only
  // enable_local_combine makes them push.
  bool pushes_rows(std::int64_t tokens) const;

  // OwnMemory::keep(). Where there is none, Error (resource) breaks the layer on every rank after
  // the exchange of a call.
  std::shared_ptr<Region> keep(std::int64_t bytes) { return own_->keep(bytes); }
  // The same memory in every call, of [NN, T, K] floats and as many behind them: a combine's
  // weights.
  float* combine_weights();

  // ---- A call, in this order on every rank, as the body of CudaCalls::run().

  // CudaCalls::begin() of a call for which `sm_count`, which may not have been checked, was asked;
  // 0: the layer's. Returns the call's number.
  std::uint64_t begin(std::string_view operation, Stream stream, int sm_count = 0);
  // Regions::reserve().
  std::vector<Extent> reserve(std::span<const std::int64_t> bytes, std::int64_t room);
  // The regions' beginnings at the ranks of this node, as `extents` [W] say.
  NodePointers node_pointers(std::span<const Extent> extents) const;
  // Enqueues the rows' journey to or from other nodes: fabric::rail_send().
  void rail_send(const RailSendParams& params);
  // Behind rail_send() and what may run while its puts are under way: enqueues the wait for them.
  void quiet();
  // After everything is enqueued: Handshake::throw_deferred().
  void end();

  // A call of its own that waits for all ranks (of this node).
  void barrier(bool node_only, Stream stream);

 private:
  void load_kernels(std::span<const CudaOperation> operations);
  std::shared_ptr<SymmetricMemory> allocate(std::int64_t bytes, std::string_view what);
  std::shared_ptr<SymmetricMemory> allocate_own(std::int64_t bytes);
  NodePointers node_pointers_of(SymmetricMemory& memory) const;
  SymmetricView view_of(SymmetricMemory& memory, std::byte** pointers) const;
  std::size_t pointers_bytes() const;  // of the pointers to a memory's ranks
  std::byte** segment_row(std::int64_t segment) const;

  std::shared_ptr<Transport> transport_;
  Place place_;
  const FabricKernels* fabric_;
  int blocks_ = 1;
  int call_blocks_ = 1, call_sm_count_ = 1;  // of this call
  bool world_is_one_gpu_ = false;
  std::shared_ptr<const char> identity_ = std::make_shared<const char>('\0');

  std::shared_ptr<std::byte> private_;  // CudaState and tables of pointers
  std::byte** segments_ = nullptr;
  std::shared_ptr<SymmetricMemory> control_, rail_, pushed_;
  Regions regions_;
  std::optional<OwnMemory> own_;
  std::shared_ptr<Region> combine_weights_;
  LayerView view_;
  std::optional<Handshake> handshake_;
  CudaCalls calls_;  // the last member: all of the above goes when the last call has ended
};

}  // namespace winnow::expert_parallel
