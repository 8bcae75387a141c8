// Ranks meet in a store and compare what must be equal, before anything is shared. Internal.
#pragma once

#include <functional>
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
  std::string prefix;     // of the keys in the store: of no other agreement of these ranks
  int rank = 0;
  int world_size = 1;
  Fields same;  // must be equal on every rank, beside world_size and the library's version
  Fields own;   // what the others want to know of this rank
  // Why a rank will certainly not come, "process 4711, gone"; empty if it may still come. Also
  // called before the rank has announced itself. Absent: nothing is known of any rank.
  std::function<std::string(int rank)> ended;
};

struct Agreement {
  std::string id;                          // random, the same on every rank
  std::vector<Fields> own;                 // of every rank
  std::vector<ProcessIdentity> processes;  // of every rank
};

// Collective. Returns when every rank has come and is known to go on. A rank that comes late learns
// at once that the others have given up. Errors (winnow::Error): timeout, naming the ranks that did
// not come or have ended; invalid_argument, naming the field that differs with its values and
// ranks, or a rank that two callers claim to be; those of the store.
WINNOW_EXPORT Agreement agree(Store& store, const AgreementRequest& request,
                              const Deadline& deadline);

// Throws the error that another rank has reported since this rank agreed.
WINNOW_EXPORT void check_agreement(Store& store, const AgreementRequest& request);

// Gives the request the prefix of the rank's next world: every rank counts those that it has begun
// under the prefix, so that the same ranks may make one after the other. Errors: as agree(), where
// another process that lives has begun worlds as this rank.
WINNOW_EXPORT void begin_world(Store& store, AgreementRequest& request);
// Removes the keys of that agreement, which all ranks have left.
WINNOW_EXPORT void end_world(Store& store, const AgreementRequest& request);

// agree() over a transport, for a layer: every rank calls it equally often. Compares the
// transport's name too. Its keys stay until the next agreement or forget_agreement(). Errors
// besides: those of Transport::check().
WINNOW_EXPORT Agreement agree(Transport& transport, Store& store, const std::string& operation,
                              Fields same, const Deadline& deadline, Fields own = {});

// Removes the keys of the last agreement over the transport from the store. A collective step after
// it has shown that all ranks have left it.
WINNOW_EXPORT void forget_agreement(Transport& transport, Store& store);

}  // namespace winnow::expert_parallel
