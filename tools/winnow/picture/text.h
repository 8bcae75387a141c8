// Text in a picture, in DejaVu Sans, which the program carries with it.
#pragma once

#include <string_view>

#include "tools/winnow/picture/image.h"

namespace winnow::picture {

enum class Align { left, center, right };

// Draws one line of UTF-8 text whose baseline begins, has its middle or ends at `anchor`. `size` is
// the height of the font in pixels. Characters that the font lacks become a small square.
void draw_text(Image& image, Point anchor, std::string_view text, double size, Color color,
               Align align = Align::left);

// The same, read from below to above.
void draw_text_upwards(Image& image, Point anchor, std::string_view text, double size, Color color,
                       Align align = Align::left);

double text_width(std::string_view text, double size);

}  // namespace winnow::picture
