#include "winnow/sparse_mla/problem.h"

#include <algorithm>
#include <limits>
#include <string>

#include "winnow/core/check.h"

namespace winnow::sparse_mla {
namespace {

// What errors call the arguments of a source.
struct SourceNames {
  std::string_view indices, topk_length, key_start, key_end;
  std::string_view list, beside_start, beside_end, without_list;
};
constexpr SourceNames kFirst{"indices",
                             "topk_length",
                             "key_start",
                             "key_end",
                             "a tensor [s_q, 1, topk]",
                             "[s_q], beside key_start",
                             "[s_q], beside key_end",
                             "none, without indices"};
constexpr SourceNames kExtra{"extra_indices",
                             "extra_topk_length",
                             "extra_key_start",
                             "extra_key_end",
                             "a tensor [s_q, 1, extra_topk]",
                             "[s_q], beside extra_key_start",
                             "[s_q], beside extra_key_end",
                             "none, without extra_indices"};

void check_choice(const Check& check, const SourceArgs& args, const SourceNames& names) {
  const bool ranges = args.key_start.present() || args.key_end.present();
  if (!args.indices.present() && ranges) {
    check.rank(names.key_start, args.key_start, 1, names.beside_end);
    check.rank(names.key_end, args.key_end, 1, names.beside_start);
    check.that(!args.topk_length.present(), names.topk_length, names.without_list, "a tensor");
  } else if (ranges) {
    check.that(false, args.key_start.present() ? names.key_start : names.key_end,
               "none, beside " + std::string(names.indices), "a tensor");
  } else {
    check.that(args.indices.present(), names.indices, names.list, "none");
  }
}

void check_rows(const Check& check, std::string_view name, const ConstTensorView& kv) {
  check.that(kv.size(0) <= std::numeric_limits<std::int32_t>::max(), name,
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(kv.size(0)));
}

}  // namespace

Source source_of(const SourceArgs& args) {
  Source source;
  if (!args.kv.present()) return source;
  static_cast<RowLimits&>(source) = limits_of(args);
  source.s_kv = args.kv.size(0);
  source.dense = !args.indices.present();
  source.topk = source.dense ? source.s_kv : args.indices.size(args.indices.rank() - 1);
  source.kv = rows_of<const void*>(args.kv, 0);
  source.indices = rows_of<const std::int32_t*>(args.indices, 0);
  source.topk_length = rows_of<const std::int32_t*>(args.topk_length, 0);
  return source;
}

void check_width(const Check& check, const ConstTensorView& q) {
  check.that(q.size(2) == 576 || q.size(2) == 512, "q", "d_qk = 576 or 512",
             "d_qk = " + std::to_string(q.size(2)));
}

void check_rows(const Check& check, const ConstTensorView& kv) { check_rows(check, "kv", kv); }

void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& q) {
  check.finite("scale", scale, q.dtype());
}

void check_choice(const Check& check, const SourceArgs& args) { check_choice(check, args, kFirst); }

void check_extra(const Check& check, const SourceArgs& args) {
  constexpr std::string_view kStride = "extra_k_stride";
  if (args.kv.present()) {
    check_rows(check, "extra_kv", args.kv);
    check_choice(check, args, kExtra);
    check.that(args.k_stride >= 1, kStride, "1 or more", std::to_string(args.k_stride));
    check.that(args.q_start.has_value() || args.k_stride == 1, kStride, "1 where q_start is absent",
               std::to_string(args.k_stride));
    return;
  }
  const auto none = [&](std::string_view name, const ConstTensorView& view) {
    check.that(!view.present(), name, "none, without extra_kv", "a tensor");
  };
  none(kExtra.indices, args.indices);
  none(kExtra.topk_length, args.topk_length);
  none(kExtra.key_start, args.key_start);
  none(kExtra.key_end, args.key_end);
  check.that(args.k_stride == 1, kStride, "1, without extra_kv", std::to_string(args.k_stride));
}

void check_beside_extra(const Check& check, std::string_view name, const ConstTensorView& output,
                        const ConstTensorView& extra_kv) {
  if (extra_kv.present()) {
    check.that(output.present(), name, "a tensor, beside extra_kv", "none");
  } else {
    check.that(!output.present(), name, "extra_kv to be given as well", "no extra_kv");
  }
}

void check_for_gpu(const Check& check, std::string_view argument, const ConstTensorView& view) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
  check.aligned(argument, view, kAlignment);
}

void check_one_source(const Check& check, Backend backend, const Problem& problem) {
  if (!problem.extra.kv.present()) return;
  check.unsupported(std::string(to_string(backend)) + ": want no extra_kv, got a tensor");
}

void check_sizes_for_gpu(const Check& check, Backend backend, const Problem& problem) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  const std::int64_t heads = std::max<std::int64_t>(problem.h_q, 1);
  const std::int64_t topk = problem.topk, extra_topk = problem.extra.topk;
  if (topk <= kLimit && extra_topk <= kLimit - topk && heads <= kLimit &&
      problem.s_q <= kLimit / heads) {
    return;
  }
  const bool two = problem.extra.kv.present();
  check.unsupported(std::string(to_string(backend)) + ": want topk" +
                    std::string(two ? " + extra_topk" : "") +
                    " and s_q * h_q up to 2^30, got topk " + std::to_string(topk) +
                    (two ? ", extra_topk " + std::to_string(extra_topk) : "") + ", s_q " +
                    std::to_string(problem.s_q) + ", h_q " + std::to_string(problem.h_q));
}

}  // namespace winnow::sparse_mla
