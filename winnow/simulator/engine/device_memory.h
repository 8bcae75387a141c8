// Which addresses are what. Internal.
#pragma once

#include <cstddef>
#include <string>

#include "winnow/simulator/engine.h"

namespace winnow::simulator {

// allocate() and free(), once nothing runs that uses the memory.
void* map_memory(std::size_t bytes, bool of_host);
void unmap_memory(void* memory);

bool is_shared(const void* address);  // of the block that runs
// Whether all of it is in one allocation of the device.
bool is_allocated(const void* address, std::size_t bytes);
bool is_of_host(const void* address);
// Code, constants and variables of the program itself.
bool is_in_program(const void* address);
// What engine.h's checks do, but for the note of the access: false for parameters. And those of an
// atomic operation or a strong store, and of a bulk copy.
bool check_global_place(const void* address, std::size_t bytes, std::size_t alignment,
                        const Where& where);
void check_strong_write(const void* address, std::size_t bytes, Scope scope, const char* what,
                        const Where& where);
void check_copied(const void* address, std::size_t bytes, const char* what, const Where& where);

// "byte 8 of an allocation of 64 bytes".
std::string place_in_memory(const void* address);

// Of a store that is about to be made, and is in no order with what `text` names. Where it stores
// what is there already, as threads do that set one flag, nobody can tell.
void hold_store(const void* address, std::size_t bytes, const std::string& text,
                const Where& where);
// Behind what a thread did: reports the store that is held, if it has changed anything.
void settle_store();
// After a report: the access that made it is over.
void forget_access();

}  // namespace winnow::simulator
