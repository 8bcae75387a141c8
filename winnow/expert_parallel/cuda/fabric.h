// The table of the kernels that put across nodes: the device code of a transport's puts may be in a
// library of its own. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// One block. Waits until all ranks of the world or of this node have come.
struct BarrierParams {
  LayerView view;
  bool node_only = false;
};

struct CountExchangeParams;  // count_exchange_cuda.h
struct ExchangeParams;       // exchange_cuda.h
struct RailSendParams;       // rail_cuda.h

// Each returns a cudaError_t. Made by make_fabric() of fabric_kernels.cuh.
struct FabricKernels {
  int (*load)() = nullptr;  // the kernels onto the current GPU
  int (*exchange)(const ExchangeParams& params, void* stream) = nullptr;
  int (*barrier)(const BarrierParams& params, void* stream) = nullptr;
  int (*rail_send)(const RailSendParams& params, int blocks, void* stream) = nullptr;
  // Waits after rail_send until the memory from which it put may be written again. Enqueues nothing
  // if that is the case when rail_send has ended.
  int (*quiet)(const LayerView& view, void* stream) = nullptr;
  int (*notify)(const CountExchangeParams& params, void* stream) = nullptr;
  // Tells the other nodes of the fault that rank `reporter`, which may be this one, has reported. A
  // fault that the host of this rank has `found` is told to its own node as well.
  int (*signal_fault)(const LayerView& view, int reporter, const FaultNotice& found,
                      void* stream) = nullptr;
};

// Copies through SymmetricView::peers: in_process.
const FabricKernels& pointer_fabric();

}  // namespace winnow::expert_parallel
