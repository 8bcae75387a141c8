// Arguments of the expert_parallel bindings: stores, times.
#pragma once

#include <chrono>
#include <memory>

#include <nanobind/nanobind.h>

#include "winnow/expert_parallel/rendezvous/store.h"

namespace winnow::python {

// A store of the library, a directory (FileStore), or an object with the interface of
// torch.distributed.Store. Errors name `operation`. Call with the interpreter lock held.
std::shared_ptr<expert_parallel::Store> store_argument(const char* operation,
                                                       nanobind::handle store);

// Seconds. None, or 0, is the library's default.
std::chrono::nanoseconds timeout_argument(const char* operation, nanobind::handle seconds);

}  // namespace winnow::python
