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
  std::string prefix;     // of the keys in the store
  int rank = 0;
  int world_size = 1;
  Fields same;  // must be equal on every rank, beside world_size and the library's version
  Fields own;   // what the others want to know of this rank
  // The prefix has not been used before. A rank that comes late then learns at once that the others
  // have given up. Otherwise the keys may be left from earlier worlds, whose processes may be gone.
  bool fresh_prefix = false;
  // Why a rank will certainly not come, "process 4711, gone"; empty if it may still come. Also
  // called before the rank has announced itself. Absent: nothing is known of any rank.
  std::function<std::string(int rank)> ended;
};

struct Agreement {
  std::string id;                          // random, the same on every rank
  std::string nonce;                       // of this rank
  std::vector<Fields> own;                 // of every rank
  std::vector<ProcessIdentity> processes;  // of every rank
};

// Collective. Returns when every rank has come and is known to go on. If ranks of two jobs meet
// under one prefix, all of them get an error: job_id() is compared, a rank with two callers is
// detected, and so is a world of other processes that still live or that, without job_id(), met
// while a rank of the new world was running. Errors (winnow::Error): timeout, naming the ranks that
// did not come; invalid_argument, naming the field that differs with its values and ranks, or a
// rank that two processes claim to be; those of the store.
WINNOW_EXPORT Agreement agree(Store& store, const AgreementRequest& request,
                              const Deadline& deadline);

// Throws the error that another rank has reported since this rank agreed.
WINNOW_EXPORT void check_agreement(Store& store, const AgreementRequest& request,
                                   const Agreement& agreement);

// agree() over a transport, for a layer: every rank calls it equally often. Compares the
// transport's name too. Its keys stay until the next agreement or forget_agreement(). Errors
// besides: those of Transport::check().
WINNOW_EXPORT Agreement agree(Transport& transport, Store& store, const std::string& operation,
                              Fields same, const Deadline& deadline, Fields own = {});

// Removes the keys of the last agreement over the transport from the store. A collective step after
// it has shown that all ranks have left it.
WINNOW_EXPORT void forget_agreement(Transport& transport, Store& store);

}  // namespace winnow::expert_parallel
