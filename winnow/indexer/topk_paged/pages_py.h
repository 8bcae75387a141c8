// What the bindings of topk_paged and scores_paged share.
#pragma once

#include "winnow/indexer/quantize/quantize.h"
#include "winnow/python/operation.h"

namespace winnow::python {

// Sets the pages, which hold keys and their scales, in the call that winnow.supports() asks about.
constexpr auto pages_for_supports = [](Shape& shape, auto& args) {
  const std::int64_t bytes = indexer::page_bytes(shape.size("d"));
  args.pages = shape.view(DType::u8, {shape.size("num_pages"), bytes});
};

}  // namespace winnow::python
