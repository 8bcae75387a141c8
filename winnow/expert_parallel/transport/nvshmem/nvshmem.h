// A world whose ranks are processes with one GPU each, on one host or several, connected by
// NVSHMEM.
#pragma once

#include <memory>
#include <string>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// Collective over the processes: they meet in the store under `prefix`, compare what must be equal,
// and only then start NVSHMEM. `device` is this rank's own GPU: if every process sees all GPUs of
// its machine, Device{DeviceType::cuda, launch_environment()->local_rank}. The store is kept: every
// later allocation is agreed in it first, with its deadline, since NVSHMEM's own collective calls
// wait without end.
//
// The transport has GPU memory only (allocate_cuda()). put() and put_signal() are Errors, since
// only kernels put. peer() of its memory is a pointer if NVSHMEM reaches that rank over NVLink.
//
// A process has one NVSHMEM world for its life. A second transport of the same ranks shares it;
// ranks of other worlds are refused. NVSHMEM is never stopped, since stopping needs every rank.
// After the death of a rank, or an NVSHMEM call that did not end in time, existing objects can be
// destroyed, but the world supports no new transport, memory or layer; restart the processes.
//
// The environment variables NVSHMEM_DISABLE_NVLS and NVSHMEM_DISABLE_NCCL are set to 1 in this
// process, since NVLink multicast must not be used, and so is NVSHMEM_DISABLE_LOCAL_ONLY_PROXY,
// without which a process may crash at its end.
//
// Errors (winnow::Error), the same on every rank: unsupported: this build or machine has no
// NVSHMEM, no such GPU or none of compute capability 9.0, two ranks with one GPU or in one process,
// a world that has lost a rank; invalid_argument: a rank outside the world, another world size,
// library or NVSHMEM version on some rank, two processes of one rank, a process of another NVSHMEM
// world; timeout, naming the ranks that did not come; internal: NVSHMEM did not start.
WINNOW_EXPORT std::shared_ptr<Transport> create_nvshmem(std::shared_ptr<Store> store, int rank,
                                                        int world_size, Device device,
                                                        const Deadline& deadline,
                                                        const std::string& prefix = "winnow");

}  // namespace winnow::expert_parallel
