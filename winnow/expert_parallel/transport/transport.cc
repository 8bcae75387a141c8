#include "winnow/expert_parallel/transport/transport.h"

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

std::shared_ptr<SymmetricMemory> Transport::allocate_cuda(Device device, std::size_t,
                                                          const Deadline&, std::string_view) {
  throw Error(ErrorCode::unsupported, "expert_parallel::allocate",
              "the transport " + name() + " has no memory on " + to_string(device));
}

std::shared_ptr<void> Transport::watch_peers(std::function<void(int)>) { return nullptr; }

}  // namespace winnow::expert_parallel
