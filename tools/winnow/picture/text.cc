#include "tools/winnow/picture/text.h"

#include <cmath>
#include <vector>

#define STB_TRUETYPE_IMPLEMENTATION
#define STBTT_STATIC
#include <stb/stb_truetype.h>

#include "winnow/core/error.h"

// The font file becomes part of the program (WINNOW_FONT_PATH comes from CMake).
__asm__(
    ".pushsection .rodata\n"
    ".balign 16\n"
    "winnow_picture_font:\n"
    ".incbin \"" WINNOW_FONT_PATH
    "\"\n"
    ".byte 0\n"
    ".popsection\n"
    ".globl winnow_picture_font\n"
    ".hidden winnow_picture_font\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char winnow_picture_font[];

namespace winnow::picture {
namespace {

constexpr int kMissing = 0x25a1;  // WHITE SQUARE

const stbtt_fontinfo& font() {
  static const stbtt_fontinfo info = [] {
    stbtt_fontinfo result;
    if (stbtt_InitFont(&result, winnow_picture_font, 0) == 0) {
      throw Error(ErrorCode::internal, "draw_text", "the embedded font cannot be read");
    }
    return result;
  }();
  return info;
}

// Glyph numbers of the text. Bytes that are not UTF-8 count as missing characters.
std::vector<int> glyphs(std::string_view text) {
  std::vector<int> result;
  for (std::size_t i = 0; i < text.size();) {
    const unsigned lead = static_cast<unsigned char>(text[i++]);
    int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
    unsigned code = more == 3 ? lead & 0x07u : more == 2 ? lead & 0x0fu : lead & 0x1fu;
    if (more == 0) code = lead < 0x80 ? lead : unsigned{kMissing};
    for (; more > 0 && i < text.size() && (text[i] & 0xc0) == 0x80; --more, ++i) {
      code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3fu);
    }
    int glyph = stbtt_FindGlyphIndex(&font(), static_cast<int>(code));
    if (glyph == 0) glyph = stbtt_FindGlyphIndex(&font(), kMissing);
    result.push_back(glyph);
  }
  return result;
}

double scale_of(double size) {
  return double(stbtt_ScaleForPixelHeight(&font(), static_cast<float>(size)));
}

double advance(int glyph, int next_glyph, double scale) {
  int width = 0, bearing = 0;
  stbtt_GetGlyphHMetrics(&font(), glyph, &width, &bearing);
  if (next_glyph != 0) width += stbtt_GetGlyphKernAdvance(&font(), glyph, next_glyph);
  return scale * width;
}

double width_of(const std::vector<int>& line, double scale) {
  double width = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    width += advance(line[i], i + 1 < line.size() ? line[i + 1] : 0, scale);
  }
  return width;
}

// plot(along, across, coverage): along the reading direction, across downwards from the baseline.
template <class Plot>
void draw_line(std::string_view text, double start, double size, const Plot& plot) {
  const std::vector<int> line = glyphs(text);
  const double scale = scale_of(size);
  double pen = start;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const double whole = std::floor(pen);
    int width = 0, height = 0, left = 0, top = 0;
    unsigned char* bitmap = stbtt_GetGlyphBitmapSubpixel(
        &font(), static_cast<float>(scale), static_cast<float>(scale),
        static_cast<float>(pen - whole), 0.0f, line[i], &width, &height, &left, &top);
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        const double coverage = bitmap[y * width + x] / 255.0;
        plot(static_cast<int>(whole) + left + x, top + y, coverage);
      }
    }
    stbtt_FreeBitmap(bitmap, nullptr);
    pen += advance(line[i], i + 1 < line.size() ? line[i + 1] : 0, scale);
  }
}

double aligned_start(std::string_view text, double size, Align align) {
  if (align == Align::left) return 0;
  const double width = text_width(text, size);
  return align == Align::center ? -width / 2 : -width;
}

}  // namespace

double text_width(std::string_view text, double size) {
  return width_of(glyphs(text), scale_of(size));
}

void draw_text(Image& image, Point anchor, std::string_view text, double size, Color color,
               Align align) {
  const int baseline = static_cast<int>(std::lround(anchor.y));
  draw_line(text, anchor.x + aligned_start(text, size, align), size,
            [&](int along, int across, double coverage) {
              image.blend(along, baseline + across, color, coverage);
            });
}

void draw_text_upwards(Image& image, Point anchor, std::string_view text, double size, Color color,
                       Align align) {
  const int baseline = static_cast<int>(std::lround(anchor.x));
  const int bottom = static_cast<int>(std::lround(anchor.y));
  draw_line(text, aligned_start(text, size, align), size,
            [&](int along, int across, double coverage) {
              image.blend(baseline + across, bottom - along, color, coverage);
            });
}

}  // namespace winnow::picture
