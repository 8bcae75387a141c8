// Emptying the L2 cache of what a benchmark left there.
#pragma once

namespace winnow::cli {

// Queues a kernel on the default stream that reads `bytes` zero bytes, so that only they are in the
// cache afterwards, unmodified: a cache full of modified lines would have to be written back while
// the next kernel is timed. `word` is 4 bytes of the same GPU, which stay as they are.
void queue_l2_flush(const void* zeros, long long bytes, void* word);

}  // namespace winnow::cli
