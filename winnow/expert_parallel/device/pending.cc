// Until the files of dispatch and combine for GPUs are here.
#include "winnow/expert_parallel/combine/combine.h"
#include "winnow/expert_parallel/device/device_layer.h"
#include "winnow/expert_parallel/dispatch/dispatch.h"

namespace winnow::expert_parallel {

Dispatched dispatch(DeviceLayer&, const DispatchArgs&) {
  throw Error(ErrorCode::unsupported, "expert_parallel::dispatch", "not on a GPU yet");
}
Tensor combine(DeviceLayer&, const CombineArgs&, const Descriptor&) {
  throw Error(ErrorCode::unsupported, "expert_parallel::combine", "not on a GPU yet");
}
int load_dispatch_kernels() { return 0; }
int load_combine_kernels() { return 0; }

}  // namespace winnow::expert_parallel
