// The pictures of the demo.
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

// The same stretch, experts x tokens: which experts a token goes to, and to which ranks it travels.
picture::Image draw_experts(const DemoState& state);

// The document's file name without folders, for titles.
std::string short_name(const Document& document);

// A label for each token of the stretch: the character that begins at its byte. White space and
// control characters get a visible sign, the further bytes of a character a dot.
std::vector<std::string> token_labels(const std::string& text, std::int64_t begin);

}  // namespace winnow::demo
