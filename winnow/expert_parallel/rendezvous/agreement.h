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
  // Nobody has used the prefix before. Then a rank that comes late learns at once that the others
  // have given up. Otherwise the keys may be left from earlier worlds, whose processes may be gone.
  bool fresh_prefix = false;
  // What is known of a rank that will certainly not come, also before it has announced itself:
  // "process 4711, gone"; empty while it may. Absent: nothing is known of anybody.
  std::function<std::string(int rank)> ended;
};

struct Agreement {
  std::string id;                          // random, the same on every rank
  std::string nonce;                       // of this rank
  std::vector<Fields> own;                 // of every rank
  std::vector<ProcessIdentity> processes;  // of every rank
};

// Collective. Returns when every rank has come and all are known to go on. Ranks of two jobs that
// meet under one prefix all get an error: job_id() is compared, a rank that has two callers is
// found out, and so is a world of other processes that still live or, without job_id(), that met
// while a rank of the new one was running. Errors (winnow::Error): timeout,
// naming the ranks that did not come; invalid_argument, naming the field that differs with its
// values and ranks, or a rank that two processes claim to be; those of the store.
WINNOW_EXPORT Agreement agree(Store& store, const AgreementRequest& request,
                              const Deadline& deadline);

// Throws what a rank has found wrong after this one had agreed.
WINNOW_EXPORT void check_agreement(Store& store, const AgreementRequest& request,
                                   const Agreement& agreement);

// agree() over a transport, for a layer: every rank calls it equally often. Compares the
// transport's name too. Its keys stay until the next agreement or forget_agreement(). Errors
// besides: those of Transport::check().
WINNOW_EXPORT Agreement agree(Transport& transport, Store& store, const std::string& operation,
                              Fields same, const Deadline& deadline, Fields own = {});

// Takes the keys of the last agreement over the transport out of the store. All ranks have left it,
// as a collective step behind it has told.
WINNOW_EXPORT void forget_agreement(Transport& transport, Store& store);

}  // namespace winnow::expert_parallel
