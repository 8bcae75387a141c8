#include "winnow/compressor/problem.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <string>

#include "winnow/core/check.h"
#include "winnow/core/error.h"
#include "winnow/core/on_host.h"
#include "winnow/core/read_once.h"

namespace winnow::compressor {

void check_columns(const Check& check, const ConstTensorView& kv, bool overlap) {
  constexpr std::int64_t kMultiple = 8;
  const std::int64_t series = overlap ? 2 : 1, columns = kv.size(1), d = columns / series;
  check.that(columns % (series * kMultiple) == 0 && d >= kMultiple && d <= kMostColumns, "kv",
             std::string(overlap ? "2 * d" : "d") + " columns, d a multiple of 8 up to 512",
             std::to_string(columns));
}

void check_sizes(const Check& check, const ConstTensorView& position_bias,
                 const ConstTensorView& cu_seqlens) {
  const std::int64_t ratio = position_bias.size(0);
  check.that(ratio >= 1 && ratio <= kMostRatio, "position_bias", "a ratio of 1 to 128 rows",
             std::to_string(ratio));
  check.that(cu_seqlens.size(0) >= 1, "cu_seqlens", "a number more than sequences", "none");
}

void check_row_columns(const Check& check, std::string_view argument, const ConstTensorView& rows,
                       const ConstTensorView& kv, bool overlap) {
  const std::int64_t d = kv.size(1) / (overlap ? 2 : 1);
  check.that(rows.size(1) == d, argument,
             "d = " + std::to_string(d) + " columns, " +
                 (overlap ? "half as many as kv" : "as many as kv"),
             std::to_string(rows.size(1)));
}

void check_finish(const Check& check, const Finish& finish) {
  const bool norm = finish.norm_weight.present(), rotated = finish.cos.present();
  check.that(norm || !finish.eps.has_value(), "eps", "none, where norm_weight is absent",
             "a number");
  check.finite("eps", finish.eps, finish.kv.dtype());
  check.that(finish.eps.value_or(0) >= 0, "eps", "at least 0",
             std::to_string(finish.eps.value_or(0)));
  check.that(rotated == finish.sin.present(), "sin",
             rotated ? "a tensor, as cos is" : "none, where cos is absent",
             rotated ? "none" : "a tensor");
  if (rotated) {
    check.that(2 * finish.cos.size(1) <= finish.d, "cos",
               "up to d / 2 = " + std::to_string(finish.d / 2) + " columns",
               std::to_string(finish.cos.size(1)));
  }
  check.that(!finish.hadamard || std::has_single_bit(static_cast<std::uint64_t>(finish.d)),
             "hadamard", "d a power of two", "d = " + std::to_string(finish.d));
}

void check_for_cuda(const Check& check, const ConstTensorView& kv, std::int64_t rows) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // a kernel's numbers of them are ints
  const std::int64_t most = std::max(kv.size(0), rows);
  if (most > kMost) {
    check.unsupported("cuda: want up to 2^30 tokens and rows, got " + std::to_string(most));
  }
}

std::vector<Sequence> read_sequences(std::string_view operation, const Packed& packed,
                                     const RunOptions& options) {
  const Check check(operation);
  const auto on_host = [&](const ConstTensorView& view) {
    const auto* data = view.present() ? static_cast<const std::int32_t*>(view.data()) : nullptr;
    return OnHost<std::int32_t>(data, view.present() ? view.numel() : 0, packed.cu_seqlens.device(),
                                options.stream);
  };
  const auto seqlens = on_host(packed.cu_seqlens), rows = on_host(packed.cu_rows),
             positions = on_host(packed.first_position);
  const auto read = [](const OnHost<std::int32_t>& list, std::int64_t at) -> std::int64_t {
    return read_once(list.data() + at);
  };
  std::int64_t token = read(seqlens, 0), row = 0;
  check.that(token == 0, "cu_seqlens", "0 first", std::to_string(token));
  const auto check_row = [&](std::int64_t at) {
    const std::int64_t given = packed.cu_rows.present() ? read(rows, at) : row;
    if (given == row) return;
    check.that(false, "cu_rows",
               std::to_string(row) + " at place " + std::to_string(at) +
                   ", the rows of the sequences before",
               std::to_string(given));
  };
  check_row(0);
  std::vector<Sequence> sequences;
  try {
    sequences.resize(static_cast<std::size_t>(packed.cu_seqlens.size(0) - 1));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::resource, std::string(operation), "out of memory for the sequences");
  }
  for (std::int64_t i = 0; Sequence & sequence : sequences) {
    const std::int64_t begin = token;
    token = read(seqlens, i + 1);
    if (token < begin) {
      check.that(false, "cu_seqlens", "no number below the one before",
                 std::to_string(token) + " after " + std::to_string(begin) + " at place " +
                     std::to_string(i + 1));
    }
    sequence = {.token = begin, .tokens = token - begin, .row = row};
    if (packed.cu_rows.present()) sequence.rows = sequence.tokens / packed.ratio;
    if (packed.first_position.present()) sequence.position = read(positions, i);
    if (sequence.position < 0) {
      check.that(false, "first_position", "positions of at least 0",
                 std::to_string(sequence.position) + " for sequence " + std::to_string(i));
    }
    row += sequence.rows;
    check_row(++i);
  }
  check.that(token == packed.tokens, "cu_seqlens",
             std::to_string(packed.tokens) + " last, the tokens of kv", std::to_string(token));
  return sequences;
}

void check_rows(const Check& check, std::span<const Sequence> sequences, std::int64_t ratio,
                std::string_view argument, std::int64_t rows, const ConstTensorView& cos) {
  const std::int64_t wanted = sequences.empty() ? 0 : sequences.back().row + sequences.back().rows;
  check.that(rows == wanted, argument, std::to_string(wanted) + " rows, the last of cu_rows",
             std::to_string(rows));
  if (!cos.present()) return;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].rows == 0) continue;
    check_position(check, cos, sequences[i].position + (sequences[i].rows - 1) * ratio, i);
  }
}

void check_position(const Check& check, const ConstTensorView& cos, std::int64_t position,
                    std::size_t i) {
  if (position < cos.size(0)) return;
  check.that(false, "cos",
             "a row for position " + std::to_string(position) + ", where a window of sequence " +
                 std::to_string(i) + " begins",
             std::to_string(cos.size(0)) + " rows");
}

}  // namespace winnow::compressor
