// Who wrote a word of the device's memory last, for reports of wrong results.
#pragma once

#include <cstddef>
#include <string>

#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// From now on writes are noted, or none any more. Forgets those before.
void note_writers(bool on);
bool notes_writers();
// The running thread writes the bytes of the device's memory.
void note_write(const void* address, std::size_t bytes, const Where& where);
// Memory of the device that is freed has no writers; what is copied elsewhere keeps those it has.
void forget_writers(const void* begin, std::size_t bytes);
void note_copy(const void* to, const void* from, std::size_t bytes);

// "was last written by thread 3 (warp 0) of block [1, 0, 0] in launch 2 (forward_kernel),
// at forward_sm90.cuh:312", and what the thread had waited for last: "as "consume" 5". Of an
// address in either memory.
std::string describe_writer(const void* address);

}  // namespace winnow::simulator
