// Sizes worked by hand, and what does not fit 63 bits.
#include "winnow/expert_parallel/queue_buffers/queue_buffers.h"

#include <limits>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

template <class Call>
void expect_refusal(const Call& call, const std::string& text) {
  testing::expect_error(call, ErrorCode::invalid_argument, "expert_parallel::" + text);
}

TEST(Sizes, SourceMetaIsANodeAndAMaskInWholeWords) {
  EXPECT_EQ(source_meta_bytes(1), 8);
  EXPECT_EQ(source_meta_bytes(8), 8);
  EXPECT_EQ(source_meta_bytes(32), 8);
  EXPECT_EQ(source_meta_bytes(33), 12);
  EXPECT_EQ(source_meta_bytes(72), 16);
  // The mask of 2^63 - 1 ranks has 2^58 words.
  EXPECT_EQ(source_meta_bytes(kMost), 4 + 4 * (std::int64_t{1} << 58));
  expect_refusal([] { source_meta_bytes(0); },
                 "source_meta_bytes: local_world_size: want at least 1, got 0");
}

TEST(Sizes, ARecordIsRoundedUpTo16Bytes) {
  // bf16 with 7168 columns and 8 experts: 14336 + 8 + 32 + 32 = 14408.
  EXPECT_EQ(bytes_per_token(14336, 0, 8, 8), 14416);
  // fp8 with 56 scales: 7168 + 8 + 224 + 32 + 32 = 7464.
  EXPECT_EQ(bytes_per_token(7168, 56, 8, 8), 7472);
  EXPECT_EQ(bytes_per_token(0, 0, 0, 0), 16);
  EXPECT_EQ(bytes_per_token(16, 2, 0, 0), 32);  // full as it is
  EXPECT_EQ(bytes_per_token(16, 1, 1, 1), 48);
  EXPECT_EQ(bytes_per_token(16, 1, 1, 0, 8), 32);
  EXPECT_EQ(bytes_per_token(16, 1, 1, 0, 33), 48);  // one word of mask more
}

TEST(Sizes, ARecordBeyond63BitsIsRefused) {
  // 2^63 - 16 is the largest multiple of 16; 8 of them are the source meta.
  EXPECT_EQ(bytes_per_token(kMost - 15 - 8, 0, 0, 0), kMost - 15);
  expect_refusal([] { bytes_per_token(kMost - 15 - 7, 0, 0, 0); },
                 "bytes_per_token: size: want at most 2^63 - 1 bytes, got more for hidden_bytes "
                 "9223372036854775785, num_scales 0, num_topk_indices 0, num_topk_weights 0, "
                 "local_world_size 8");
  expect_refusal([] { bytes_per_token(1, std::int64_t{1} << 61, 2, 3); },
                 "bytes_per_token: size: want at most 2^63 - 1 bytes, got more for hidden_bytes 1, "
                 "num_scales 2305843009213693952, num_topk_indices 2, num_topk_weights 3, "
                 "local_world_size 8");
  expect_refusal([] { bytes_per_token(1, 2, -3, 4); },
                 "bytes_per_token: num_topk_indices: want at least 0, got -3");
}

TEST(Sizes, BuffersOfTwoNodesOfThree) {
  const QueueShape shape{
      .bytes_per_token = 48, .recv_tokens = 5, .nodes = 2, .local_world_size = 3, .channels = 7};
  const BufferLayout node = node_buffer_layout(shape);
  EXPECT_EQ(node.control_offset, 48 * 5 * 28);  // 2 nodes, 2 directions, 7 channels
  EXPECT_EQ(node.control_words, 10 * 28);
  EXPECT_EQ(node.bytes, 6720 + 1120);
  const BufferLayout local = local_buffer_layout(shape);
  EXPECT_EQ(local.control_offset, 48 * 5 * 21);  // 3 ranks, 7 channels
  EXPECT_EQ(local.control_words, 6 * 21);
  EXPECT_EQ(local.bytes, 5040 + 504);
}

TEST(Sizes, ClassicBuffersOfFourNodes) {
  const QueueShape shape{.bytes_per_token = 14416,
                         .recv_tokens = 128,
                         .nodes = 4,
                         .local_world_size = 8,
                         .channels = 10};
  const CleanMeta node = classic_clean_meta(QueueRoute::between_nodes, shape);
  EXPECT_EQ(node.offset, 14416LL * 128 * 4 * 2 * 10 / 4);
  EXPECT_EQ(node.count, (2 * 8 + 4) * 4 * 2 * 10);
  const CleanMeta local = classic_clean_meta(QueueRoute::inside_node, shape);
  EXPECT_EQ(local.offset, 128LL * 14416 * 8 * 10 / 4);
  EXPECT_EQ(local.count, 8 * (2 * 4 + 2) * 10);

  QueueShape other = shape;
  other.local_world_size = 4;
  expect_refusal([&] { classic_clean_meta(QueueRoute::inside_node, other); },
                 "classic_clean_meta: local_world_size: want 8, got 4");
}

TEST(Sizes, BuffersBeyond32BitsAreExactAndBeyond63Refused) {
  QueueShape shape{.bytes_per_token = 16, .recv_tokens = std::int64_t{1} << 31, .nodes = 2};
  EXPECT_EQ(node_buffer_layout(shape).control_offset, std::int64_t{1} << 37);
  EXPECT_EQ(
      classic_clean_meta(QueueRoute::inside_node, {16, std::int64_t{1} << 31, 2, 8, 1}).offset,
      std::int64_t{1} << 36);

  shape.recv_tokens = std::int64_t{1} << 57;
  expect_refusal([&] { node_buffer_layout(shape); },
                 "node_buffer_layout: size: want at most 2^63 - 1 bytes, got more for "
                 "bytes_per_token 16, recv_tokens 144115188075855872, nodes 2, local_world_size 1, "
                 "channels 1");
  EXPECT_EQ(local_buffer_layout(shape).control_offset, std::int64_t{1} << 61);
  // No record, but more control words than bytes can be counted.
  shape.recv_tokens = 0;
  shape.channels = std::int64_t{1} << 60;
  EXPECT_THROW(local_buffer_layout(shape), Error);
  shape.channels = 0;
  expect_refusal([&] { local_buffer_layout(shape); },
                 "local_buffer_layout: channels: want at least 1, got 0");
  shape = {.bytes_per_token = 16, .recv_tokens = -1};
  expect_refusal([&] { node_buffer_layout(shape); },
                 "node_buffer_layout: recv_tokens: want at least 0, got -1");
}

}  // namespace
}  // namespace winnow::expert_parallel
