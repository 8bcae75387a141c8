// Ranks meet in a store and compare what must be equal, before anything is shared. Internal.
#pragma once

#include <string>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/rendezvous/announcement.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

struct AgreementRequest {
  std::string operation;  // what errors name
  std::string prefix;     // of the keys in the store
  int rank = 0;
  int world_size = 1;
  Fields same;  // must be equal on every rank, beside world_size and the library's version
  Fields own;   // what the others want to know of this rank
  // Nobody has used the prefix before. Then a rank that comes late learns at once that the others
  // have given up. Otherwise the keys may be left from earlier worlds, whose processes may be gone.
  bool fresh_prefix = false;
};

struct Agreement {
  std::string id;                          // random, the same on every rank
  std::vector<Fields> own;                 // of every rank
  std::vector<ProcessIdentity> processes;  // of every rank
};

// Collective. Returns when every rank has come and all are known to go on. Errors (winnow::Error):
// timeout, naming the ranks that did not come; invalid_argument, naming the field that differs with
// its values and ranks, or a rank that two processes claim to be; those of the store.
WINNOW_EXPORT Agreement agree(Store& store, const AgreementRequest& request,
                              const Deadline& deadline);

// The same over a transport, for a layer: every rank calls it equally often. Compares the
// transport's name too. A store that outlives the world keeps a few hundred bytes. Errors besides:
// those of Transport::check().
WINNOW_EXPORT Agreement agree(Transport& transport, Store& store, const std::string& operation,
                              Fields same, const Deadline& deadline, Fields own = {});

}  // namespace winnow::expert_parallel
