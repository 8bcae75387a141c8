#include "winnow/simulator/conformance_cute.h"

#include <cstddef>
#include <stdexcept>

// CuTe asks a function of the device for the shared address of a pointer. Here it is the offset in
// `memory`, which holds the operands.
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
alignas(1024) static std::byte memory[1 << 18];
static std::size_t __cvta_generic_to_shared(const void* address) {
  return static_cast<std::size_t>(static_cast<const std::byte*>(address) - memory);
}

#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace winnow::cute_oracle {
namespace {

using cute::_0;
using cute::_1;
using cute::_2;
using cute::Int;
using Element = cute::bfloat16_t;

template <Operand operand>
inline constexpr bool is_k = operand == Operand::k;

// The tensor [rows][64 steps] at `start`, swizzled.
template <Operand operand, int rows>
auto tensor_at(std::uint32_t start) {
  using namespace cute;
  using Atom = std::conditional_t<
      operand == Operand::k, UMMA::Layout_K_SW128_Atom<Element>,
      std::conditional_t<operand == Operand::mn, UMMA::Layout_MN_SW128_Atom<Element>,
                         UMMA::Layout_MN_SW64_Atom<Element>>>;
  // MN-major atoms follow each other along K first: a chunk is whole before the next begins.
  using Order = std::conditional_t<is_k<operand>, Step<_1, _2>, Step<_2, _1>>;
  const auto layout = tile_to_shape(Atom{}, Shape<Int<rows>, Int<kSteps>>{}, Order{});
  return make_tensor(make_smem_ptr(reinterpret_cast<Element*>(memory + start)), layout);
}

// Calls what(operand, rows) with both as constants.
template <class What>
auto with_constants(Operand operand, int rows, const What& what) {
  const auto with_rows = [&](auto constant) {
    switch (rows) {
      case 32:
        return what(constant, Int<32>{});
      case 64:
        return what(constant, Int<64>{});
      case 128:
        return what(constant, Int<128>{});
      default:
        throw std::logic_error("rows");
    }
  };
  switch (operand) {
    case Operand::k:
      return with_rows(std::integral_constant<Operand, Operand::k>{});
    case Operand::mn64:
      return with_rows(std::integral_constant<Operand, Operand::mn64>{});
    default:
      // An atom has 64 of M or N.
      if (rows == 64) return what(std::integral_constant<Operand, Operand::mn>{}, Int<64>{});
      if (rows == 128) return what(std::integral_constant<Operand, Operand::mn>{}, Int<128>{});
      throw std::logic_error("rows");
  }
}

// The part of that tensor with the 16 steps of K from 16 * k16 on.
template <Operand operand, int rows>
auto step_at(std::uint32_t start, int k16) {
  using namespace cute;
  return local_tile(tensor_at<operand, rows>(start), Shape<Int<rows>, _16>{},
                    make_coord(_0{}, k16));
}

template <class What>
auto with_product(const PairProduct& product, const What& what) {
  using namespace cute;
  const auto with = [&](auto m, auto n, auto a, auto b) {
    return what(MMA_Traits<SM100_MMA_F16BF16_2x1SM_SS<Element, Element, float, decltype(m)::value,
                                                      decltype(n)::value, decltype(a)::value,
                                                      decltype(b)::value>>{});
  };
  using K = std::integral_constant<UMMA::Major, UMMA::Major::K>;
  using MN = std::integral_constant<UMMA::Major, UMMA::Major::MN>;
  const auto with_majors = [&](auto m, auto n) {
    if (product.a_is_k_major) {
      return product.b_is_k_major ? with(m, n, K{}, K{}) : with(m, n, K{}, MN{});
    }
    return product.b_is_k_major ? with(m, n, MN{}, K{}) : with(m, n, MN{}, MN{});
  };
  const auto with_n = [&](auto m) {
    switch (product.n) {
      case 64:
        return with_majors(m, Int<64>{});
      case 128:
        return with_majors(m, Int<128>{});
      case 256:
        return with_majors(m, Int<256>{});
      default:
        throw std::logic_error("N");
    }
  };
  if (product.m == 128) return with_n(Int<128>{});
  if (product.m == 256) return with_n(Int<256>{});
  throw std::logic_error("M");
}

// The block and the row of index i in a layout from (block, (row, column)) to i + size * column.
template <class Layout>
BlockRow find_row(const Layout& layout, int i) {
  for (int block = 0; block < 2; ++block) {
    for (int row = 0; row < cute::size<1, 0>(layout); ++row) {
      if (layout(block, cute::make_coord(row, 0)) == i) return {block, row};
    }
  }
  throw std::logic_error("no such row");
}

// Tensor memory counts lanes and columns of 32 bits.
TensorPlace tensor_place(std::uint32_t address) {
  return {0, static_cast<int>(address >> 16), static_cast<int>(address & 0xffff)};
}

// Where the first bit of a thread's register r comes from. DstLayout maps the thread and a bit of
// its registers to a bit of what the load reads, and ValID maps this to a bit of tensor memory.
template <class Load>
TensorPlace loaded(int thread, int r) {
  using Traits = cute::Copy_Traits<Load>;
  const auto bit = static_cast<std::uint64_t>(
      typename Traits::ValID{}(typename Traits::DstLayout{}(thread, 32 * r)));
  return tensor_place(static_cast<std::uint32_t>(bit / 32));
}

}  // namespace

std::uint32_t place(Operand operand, int rows, int row, int k) {
  return with_constants(operand, rows, [&](auto constant, auto count) {
    const auto tensor = tensor_at<constant.value, count.value>(0);
    const void* const element = &tensor(row, k);
    return static_cast<std::uint32_t>(static_cast<const std::byte*>(element) - memory);
  });
}

std::uint64_t sm100_descriptor(Operand operand, int rows, std::uint32_t start, int k16) {
  return with_constants(operand, rows, [&](auto constant, auto count) {
    constexpr auto kMajor = is_k<constant.value> ? cute::UMMA::Major::K : cute::UMMA::Major::MN;
    return std::uint64_t{
        cute::UMMA::make_umma_desc<kMajor>(step_at<constant.value, count.value>(start, k16))};
  });
}

std::uint64_t sm90_descriptor(Operand operand, int rows, std::uint32_t start, int k16) {
  return with_constants(operand, rows, [&](auto constant, auto count) {
    using cute::SM90::GMMA::Major;
    constexpr auto kMajor = is_k<constant.value> ? Major::K : Major::MN;
    return std::uint64_t{
        cute::SM90::GMMA::make_gmma_desc<kMajor>(step_at<constant.value, count.value>(start, k16))};
  });
}

std::uint32_t instruction_descriptor(const PairProduct& product) {
  return with_product(product,
                      [](auto traits) { return static_cast<std::uint32_t>(traits.idesc_); });
}

BlockRow row_of_a(const PairProduct& product, int i) {
  return with_product(
      product, [&](auto traits) { return find_row(typename decltype(traits)::ALayout{}, i); });
}

BlockRow row_of_b(const PairProduct& product, int j) {
  return with_product(
      product, [&](auto traits) { return find_row(typename decltype(traits)::BLayout{}, j); });
}

TensorPlace sum(const PairProduct& product, int i, int j) {
  return with_product(product, [&](auto traits) {
    using Traits = decltype(traits);
    const BlockRow row = find_row(typename Traits::CLayout{}, i);
    using Shape = decltype(cute::shape<1>(typename Traits::CLayout{}));  // of a block
    const auto sums = Traits::FrgTypeC::make(cute::Shape<Shape, _1, _1>{});
    TensorPlace place = tensor_place(
        static_cast<std::uint32_t>(sums.layout()(cute::make_coord(row.row, j), _0{}, _0{})));
    place.block = row.block;
    return place;
  });
}

TensorPlace load_32x32b(int thread, int r) {
  return loaded<cute::SM100_TMEM_LOAD_32dp32b16x>(thread, r);
}
TensorPlace load_16x256b(int thread, int r) {
  return loaded<cute::SM100_TMEM_LOAD_16dp256b4x>(thread, r);
}

}  // namespace winnow::cute_oracle
