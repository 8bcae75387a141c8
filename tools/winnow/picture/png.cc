// encode_png of image.h: the one place that knows stb_image_write.
#include "tools/winnow/picture/image.h"

#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STB_IMAGE_WRITE_STATIC
#include <stb/stb_image_write.h>

#include "winnow/core/error.h"

namespace winnow::picture {

std::string encode_png(const Image& image) {
  std::string result;
  const auto append = [](void* context, void* data, int size) {
    static_cast<std::string*>(context)->append(static_cast<const char*>(data),
                                               static_cast<std::size_t>(size));
  };
  const int written = stbi_write_png_to_func(append, &result, image.width(), image.height(), 3,
                                             image.bytes().data(), 3 * image.width());
  if (written == 0 || result.empty()) {
    throw Error(ErrorCode::resource, "encode_png", "no memory for the file");
  }
  return result;
}

}  // namespace winnow::picture
