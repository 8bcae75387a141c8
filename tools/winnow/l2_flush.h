// Flushes the L2 cache between runs of a benchmark.
#pragma once

namespace winnow::cli {

// Queues a kernel on the default stream that reads `bytes` zero bytes, so that only they are in the
// cache afterwards, unmodified: a cache full of modified lines would have to be written back while
// the next kernel is timed. `word`: 4 bytes on the GPU, which the kernel writes only if a byte is
// not zero; without them the compiler would remove the reads.
void queue_l2_flush(const void* zeros, long long bytes, void* word);

}  // namespace winnow::cli
