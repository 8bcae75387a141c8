// The product of mma.sync on a GPU, by every kernel that it can run.
#include "tools/winnow/testing/mma_product_test.h"

#include "winnow/testing/gpu_test.h"

namespace winnow::cli {
namespace {

using MmaProductGpu = testing::GpuTest<Backend::cuda>;

TEST_F(MmaProductGpu, IsRight) {
  for (const MmaProduct::Plan plan : MmaProduct::plans()) {
    SCOPED_TRACE(static_cast<int>(plan));
    // All tiles are shared; those of the last rows reach beyond them.
    expect_product(plan, {640, 768, 1024});
    // More blocks than steps.
    expect_product(plan, {128, 256, 64});
    // Whole rounds and a tail.
    expect_product(plan, {8192, 8192, 512}, 509);
    expect_product(plan, {8192, 8192, 8192}, 2047);
  }
}

}  // namespace
}  // namespace winnow::cli
