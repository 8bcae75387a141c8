// That sparse_mla::forward and decode of sm90 give the same bits, in the simulator.
#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/decode/test_beside_forward.h"

namespace winnow::sparse_mla {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

TEST(SimulatorSameBits, DecodeGivesTheBitsOfForward) {
  int schedule = 0;
  for (const DecodeCase& shape : steps_beside_forward()) {
    // Of queries of one block, and of many side by side.
    for (const int multiprocessors : {2, 36}) {
      simulator::settings().multiprocessors = multiprocessors;
      simulator::settings().schedule =
          simulator::parse_schedule("random:" + std::to_string(++schedule));
      expect_bits_of_forward(shape, kGpu);
    }
  }
  simulator::settings().multiprocessors = 2;
}

// The comparison sees the order of products: of 576 columns forward() begins with the last 64
// unless it is asked for the order of decode().
TEST(SimulatorSameBits, AnotherOrderGivesOtherBits) {
  simulator::settings().schedule = simulator::parse_schedule("random:9");
  const DecodeStep step = DecodeStep(steps_beside_forward()[0]).on(kGpu);
  const auto lse_of = [&](bool in_list_order) {
    ForwardArgs args = forward_args(step);
    Tensor out(DType::bf16, {args.q.size(0), args.q.size(1), 512}, kGpu);
    Tensor lse(DType::f32, {args.q.size(0), args.q.size(1)}, kGpu);
    args.in_list_order = in_list_order;
    args.out = out;
    args.lse = lse;
    forward(args);
    return testing::read(lse.to({}));
  };
  EXPECT_NE(lse_of(true), lse_of(false));
}

}  // namespace
}  // namespace winnow::sparse_mla
