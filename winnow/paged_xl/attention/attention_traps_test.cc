// paged_xl::attention: a test for each way in which paged relative attention is known to go wrong.
#include <cmath>
#include <cstring>
#include <memory>

#include <sys/mman.h>
#include <unistd.h>

#include "winnow/paged_xl/test_step.h"
#include "winnow/testing/far_memory.h"

namespace winnow::paged_xl {
namespace {

// Memory that ends at a page nobody may touch.
class Guarded {
 public:
  explicit Guarded(std::int64_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    usable_ = (bytes + page_ - 1) / page_ * page_;
    base_ = mmap(nullptr, static_cast<std::size_t>(usable_ + page_), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(
        mprotect(static_cast<char*>(base_) + usable_, static_cast<std::size_t>(page_), PROT_NONE),
        0);
    data_ = static_cast<char*>(base_) + usable_ - bytes;
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, static_cast<std::size_t>(usable_ + page_)); }
  void* data() const { return data_; }

 private:
  std::int64_t page_, usable_;
  void* base_;
  char* data_;
};

TEST(AttentionTraps, BlockTableIsIndexedByBlock) {
  // Every entry past the last block is a block of the cache, so that a kernel that takes the
  // table's entry of the token, not of its block, reads numbers and fails in the comparison.
  Step step = make_step({.name = "by-block", .context_lens = {40, 17}, .spare = 20});
  for (std::int64_t s = 0; s < 2; ++s) {
    for (std::int64_t b = s == 0 ? 3 : 2; b < step.block_tables.size(1); ++b) {
      step.block_tables.view().at<std::int32_t>(s, b) =
          step.block_tables.view().at<std::int32_t>(1 - s, 0);
    }
  }
  run_checked(step.attention_args());
}

TEST(AttentionTraps, BlockTableIsNotReadPastTheLastBlock) {
  Step step = make_step({.name = "table-end", .context_lens = {48}});
  const Guarded memory(3 * sizeof(std::int32_t));
  std::memcpy(memory.data(), step.block_tables.data(), 3 * sizeof(std::int32_t));
  AttentionArgs args = step.attention_args();
  // The view claims entries that would fault.
  args.block_tables = TensorView(memory.data(), DType::i32, {1, 100});
  run_checked(args);
}

TEST(AttentionTraps, BlocksPastTheContextAreNotRead) {
  const Step step = make_step({.name = "blocks-end", .head_size = 32, .context_lens = {48}});
  AttentionArgs args = step.attention_args();
  const std::int64_t used_blocks = 3, block_elements = 2 * 32 * 16;
  const std::int64_t bytes = used_blocks * block_elements * 4;
  const Guarded keys(bytes), values(bytes);
  for (std::int64_t b = 0; b < used_blocks; ++b) {
    const std::int64_t from = step.block_tables.view().at<std::int32_t>(0, b) * block_elements * 4;
    for (const auto& [to, source] :
         {std::pair{&keys, &step.key_cache.storage}, {&values, &step.value_cache.storage}}) {
      std::memcpy(static_cast<char*>(to->data()) + b * block_elements * 4,
                  static_cast<const char*>(source->data()) + from,
                  static_cast<std::size_t>(block_elements * 4));
    }
  }
  args.key_cache = TensorView(keys.data(), DType::f32, {100, 2, 8, 16, 4});
  args.value_cache = TensorView(values.data(), DType::f32, {100, 2, 32, 16});
  Tensor tables(DType::i32, {1, 4});
  std::int32_t next = 0;
  for (std::int32_t& block : tables.values<std::int32_t>()) block = next++;  // the fourth faults
  args.block_tables = tables;
  run_checked(args);
}

TEST(AttentionTraps, UnusedSlotsOfTheTailMayHoldNaN) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int32_t length : {1, 15, 17, 31}) {
      const Step step = make_step({.name = "tail", .dtype = dtype, .context_lens = {length}});
      const std::int64_t block = step.block_tables.view().at<std::int32_t>(0, (length - 1) / 16);
      ASSERT_TRUE(std::isnan(
          oracle::element(step.value_cache.view, block, std::int64_t{0}, std::int64_t{0}, 15)));
      run_checked(step.attention_args());
    }
  }
}

TEST(AttentionTraps, BiasPerHeadIsNotReadPerSequence) {
  for (const Mode mode : {Mode::plain, Mode::fused}) {
    const Step step = make_step({.name = "bias", .mode = mode, .context_lens = {5, 6, 7}});
    AttentionArgs args = step.attention_args();
    const std::int64_t bytes = 4 * 64 * 4;  // anything past one bias of 4 heads faults
    const Guarded u(bytes), v(bytes);
    std::memcpy(u.data(), step.pos_bias_u.storage.data(), static_cast<std::size_t>(bytes));
    std::memcpy(v.data(), step.pos_bias_v.storage.data(), static_cast<std::size_t>(bytes));
    args.pos_bias_u = TensorView(u.data(), DType::f32, {4, 64});
    if (mode == Mode::fused) args.pos_bias_v = TensorView(v.data(), DType::f32, {4, 64});
    run_checked(args);
  }
}

TEST(AttentionTraps, BlocksMayLieBeyondTwoToTheThirtyOneBytes) {
  // One block of 8 heads is 64 KiB in f32: block 40,000 starts at byte 2.6e9, block 80,000 beyond
  // 2^32.
  constexpr std::int64_t kBlocks = 80001, kHeads = 8, kBlockElements = kHeads * 128 * 16;
  const auto bytes = static_cast<std::size_t>(kBlocks * kBlockElements) * 4;
  const std::shared_ptr<void> caches[2] = {testing::far_memory(bytes), testing::far_memory(bytes)};
  if (caches[1] == nullptr) GTEST_SKIP() << "no address range of " << bytes << " bytes";
  Step step = make_step({.name = "far",
                         .num_heads = kHeads,
                         .num_kv_heads = kHeads,
                         .head_size = 128,
                         .context_lens = {40, 16}});
  AttentionArgs args = step.attention_args();
  const TensorView keys(caches[0].get(), DType::f32, {kBlocks, kHeads, 32, 16, 4});
  const TensorView values(caches[1].get(), DType::f32, {kBlocks, kHeads, 128, 16});
  const std::int32_t far[] = {40000, 0, 80000, 32768};  // the last starts at byte 2^31
  testing::Random random(1);
  for (const std::int32_t block : far) {
    testing::fill_normal(keys.slice(0, block, block + 1), random);
    testing::fill_normal(values.slice(0, block, block + 1), random);
  }
  for (int b = 0; b < 3; ++b) step.block_tables.view().at<std::int32_t>(0, b) = far[b];
  step.block_tables.view().at<std::int32_t>(1, 0) = far[3];
  args.key_cache = keys;
  args.value_cache = values;
  run_checked(args);
}

}  // namespace
}  // namespace winnow::paged_xl
