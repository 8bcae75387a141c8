// The program with an operation that computes something wrong, for tests.
#pragma once

namespace winnow::cli {

// Comes before the program. The broken operation comes first; AddressSanitizer would insist on
// being that.
constexpr const char* kBrokenDistribution =
    "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=" WINNOW_BROKEN_LIBRARY;

}  // namespace winnow::cli
