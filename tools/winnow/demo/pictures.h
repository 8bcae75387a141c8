// The two pictures of the demo.
#pragma once

#include "tools/winnow/demo/state.h"
#include "tools/winnow/picture/image.h"

namespace winnow::demo {

// Three maps of a stretch of the text, queries x keys: what full attention looks at, and which of
// it the top-k kept before and after training.
picture::Image draw_attention(const DemoState& state);

// Loss and captured share over the steps, with what the best, the most recent and random tokens
// capture.
picture::Image draw_training(const DemoState& state);

// The document's file name without folders, for titles.
std::string short_name(const Document& document);

}  // namespace winnow::demo
