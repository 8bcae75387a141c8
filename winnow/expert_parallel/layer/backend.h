// What AllToAll and Notifier share: how their backends are chosen and made. Internal.
#pragma once

#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/transport/deadline.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// One rank's part of an object whose calls are collective. An operation adds its calls, and each
// backend is a class.
class CollectiveBackend {
 public:
  explicit CollectiveBackend(Backend backend) : backend_(backend) {}
  virtual ~CollectiveBackend() = default;
  CollectiveBackend(const CollectiveBackend&) = delete;
  CollectiveBackend& operator=(const CollectiveBackend&) = delete;

  Backend backend() const { return backend_; }

 private:
  Backend backend_;
};

// Chooses, as choose_backend() does, between cuda, whose kernels need compute capability 9.0, and
// cpu. `forced` is Config::backend. Throws Error naming `operation`.
WINNOW_EXPORT Backend choose_layer_backend(std::string_view operation, Device device,
                                           std::optional<Backend> forced);

struct CollectiveSetup {
  std::string_view operation;  // that errors name
  Transport& transport;
  Store& store;
  const Deadline& deadline;
};

// Collective: make(choose()), a CollectiveBackend, once all ranks have given the same `fields`.
// These are compared first, so that all ranks name a rank with other sizes and none waits for it;
// choose() checks the sizes and returns the backend. Errors (winnow::Error): a difference, a rank
// that does not come, a failed allocation, and the errors of choose() and make().
template <class Choose, class Make>
auto make_collective(const CollectiveSetup& setup, const Fields& fields, const Choose& choose,
                     const Make& make) {
  const std::string operation(setup.operation);
  agree(setup.transport, setup.store, operation, fields, setup.deadline);
  const Backend backend = choose();
  const std::uint64_t agreed = setup.transport.agreements();
  decltype(make(backend)) made;
  try {
    made = make(backend);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, operation, "out of memory");
  }
  // Only after the collective allocations, and only if these were no agreements themselves.
  if (setup.transport.agreements() == agreed) {
    forget_agreement(setup.transport, setup.store);
  }
  return made;
}

}  // namespace winnow::expert_parallel
