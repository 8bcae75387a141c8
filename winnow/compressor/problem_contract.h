// What the tables of the compressor's operations have in common. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/problem.h"
#include "winnow/core/contract.h"

namespace winnow::compressor {

template <class Args>
void check_columns(const Check& check, const Args& args) {
  check_columns(check, args.kv, args.overlap);
}
template <class Args>
void check_sizes(const Check& check, const Args& args) {
  check_sizes(check, args.position_bias, args.cu_seqlens);
}
template <class Args>
void check_finish(const Check& check, const Args& args) {
  check_finish(check, Finish{args.kv, args.norm_weight, args.cos, args.sin, args.eps,
                             args.kv.size(1) / (args.overlap ? 2 : 1), args.hadamard});
}
template <class Args>
void check_first_position(const Check& check, const Args& args) {
  if (!args.first_position.present()) return;
  check.input("first_position", args.first_position, {{"n", args.cu_seqlens.size(0) - 1}},
              {DType::i32}, args.kv.device());
}
template <class Args, auto kRows>
void check_row_columns(const Check& check, const Args& args) {
  check_row_columns(check, contract::name_of<kRows>(), args.*kRows, args.kv, args.overlap);
}

// A tensor that there is just where rows are normalised.
template <class Args, auto kTensor>
void check_of_norm(const Check& check, const Args& args) {
  const bool norm = args.norm_weight.present(), given = (args.*kTensor).present();
  check.that(norm == given, contract::name_of<kTensor>(),
             norm ? "a tensor, as norm_weight is" : "none, where norm_weight is absent",
             given ? "a tensor" : "none");
}

// The tokens, and where their sequences are.
template <class Args>
consteval auto tokens() {
  using namespace contract;
  using enum DType;
  return std::tuple(
      input<&Args::kv>("[tokens, columns=512]",
                       any_of(f32, f16, bf16, f64).on_gpu(f32, f16, bf16).asked(),
                       "d columns, with overlap 2 * d; d is a multiple of 8 up to 512"),
      value<&Args::overlap>("windows are twice as wide as their distance"),
      rule<check_columns<Args>>,
      input<&Args::gate>("[tokens, columns]", as("kv"), "the logits of the softmax"),
      input<&Args::position_bias>("[ratio=4, columns]", sums_of("kv"),
                                  "added to the gates; ratio is 1 to 128"),
      input<&Args::cu_seqlens>("[n + 1]", any_of(i32), "where each packed sequence begins"),
      rule<check_sizes<Args>>);
}

// What becomes of the sums; after a tensor that names size d.
template <class Args>
consteval auto finish() {
  using namespace contract;
  return std::tuple(
      optional_input<&Args::norm_weight>("[d]", sums_of("kv"), "normalises the rows"),
      value<&Args::eps>("of the norm; 1e-6 if None"),
      optional_input<&Args::cos>("[positions, pairs]", sums_of("kv"), contract::kWithNext),
      optional_input<&Args::sin>("[positions, pairs]", sums_of("kv"),
                                 "rotate the last 2 * pairs columns"),
      value<&Args::hadamard>("transform the rows; d is a power of two"), rule<check_finish<Args>>);
}

// Where the positions of each sequence begin, and its rows.
template <class Args>
consteval auto places() {
  using namespace contract;
  return std::tuple(optional_input<&Args::first_position>(
                        "[n]", any_of(DType::i32), "of the first token of each sequence; 0 if None")
                        .by_rule(),
                    rule<check_first_position<Args>>,
                    input<&Args::cu_rows>("[n + 1]", any_of(DType::i32),
                                          "where the rows of each sequence begin"));
}

}  // namespace winnow::compressor
