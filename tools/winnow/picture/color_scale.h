// Colours for quantities.
#pragma once

#include "tools/winnow/picture/image.h"

namespace winnow::picture {

// From near white over yellow, orange and red to nearly black: lightness falls evenly, so that the
// order shows in gray, too. 0 <= value <= 1, others are clamped; NaN is like 0.
Color heat_color(double value);

// From near white to steel blue, for what is shown as missing.
Color cold_color(double value);

}  // namespace winnow::picture
