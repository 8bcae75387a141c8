// Which addresses are what. Internal.
#pragma once

#include <cstddef>

namespace winnow::simulator {

// allocate() and free(), once nothing runs that uses the memory.
void* map_memory(std::size_t bytes);
void unmap_memory(void* memory);

bool is_shared(const void* address);  // of the block that runs
// Whether all of it is in one allocation of the device.
bool is_allocated(const void* address, std::size_t bytes);
// Code, constants and variables of the program itself.
bool is_in_program(const void* address);

// Behind what a thread did: reports its last store, if that has changed what another thread may
// have written at the same time.
void settle_store();
// After a report: the access that made it is over.
void forget_access();

}  // namespace winnow::simulator
