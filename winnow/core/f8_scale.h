// The scale of a group of numbers that are stored as f8_e4m3: max(amax, 1e-4) / 448, where amax is
// their largest magnitude. Internal.
#pragma once

namespace winnow {

inline constexpr float kLeastAmax = 1e-4f;   // so that a group of zeros has a scale, too
inline constexpr float kLargestF8 = 448.0f;  // of f8_e4m3

}  // namespace winnow
