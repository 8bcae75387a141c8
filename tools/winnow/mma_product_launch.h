// Launches of the kernels of a product with mma.sync.
#pragma once

#include <cstdint>
#include <functional>

namespace winnow::cli::mma_product {

struct Product {
  int m, n, k;
  const void *a, *b;
  char* c;
  float* partial;             // sums of tiles that several blocks share; zeros between products
  unsigned* steps_of_shared;  // how many of their steps are in there; zeros, too
};

// Fewer tiles are shared than there are blocks, one on each multiprocessor. The sums of the
// largest:
inline constexpr std::int64_t kSumsBytes = std::int64_t{192} * 256 * 4;

// Shared memory that a block of each kernel may need.
inline constexpr int kBytesOfTensor192 = 227 << 10, kBytesOfThreads256 = 163 << 10,
                     kBytesOfThreads128 = 99 << 10;

// Load a kernel, and return what queues it on a stream. Tiles of 192 x 256, whose rows
// the tensor memory accelerator copies; of 128 x 256 and 128 x 128 by cp.async.
std::function<void(void* stream)> tensor_192x256(const Product& product, int blocks);
std::function<void(void* stream)> threads_128x256(const Product& product, int blocks);
std::function<void(void* stream)> threads_128x128(const Product& product, int blocks);

}  // namespace winnow::cli::mma_product
