// Agreements over a transport.
#include <string>
#include <utility>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/rendezvous/agreement_board.h"

namespace winnow::expert_parallel {

Agreement agree(Transport& transport, Store& store, const std::string& operation, Fields same,
                const Deadline& deadline, Fields own) {
  transport.check();
  const std::uint64_t number = transport.next_agreement();
  AgreementRequest request;
  request.operation = operation;
  request.prefix = agreement_key(transport.world_id(), number);
  request.rank = transport.rank();
  request.world_size = transport.world_size();
  request.same = std::move(same);
  request.same.insert(request.same.begin(), {"transport", transport.name()});
  request.own = std::move(own);
  request.fresh_prefix = true;
  request.ended = [&](int rank) {
    return transport.peer_gone(rank) ? transport.describe_peer(rank) : std::string();
  };
  Agreement agreement = agree(store, request, deadline);
  // Who has come to this one has left the one before.
  if (request.rank == 0 && number > 0) {
    store.remove(agreement_key(transport.world_id(), number - 1));
  }
  return agreement;
}

void forget_agreement(Transport& transport, Store& store) {
  if (transport.rank() != 0 || transport.agreements() == 0) return;
  try {
    store.remove(agreement_key(transport.world_id(), transport.agreements() - 1));
  } catch (const Error&) {
    // It takes a few hundred bytes, and nothing fails for them.
  }
}

}  // namespace winnow::expert_parallel
