#include "winnow/indexer/quantize/quantize.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/indexer/quantize/quantize_contract.h"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {
namespace {

void check_rows(const Check& check, const QuantizeArgs& args, QuantizeParams& params) {
  const Dim n{"n", params.n}, h{"h", params.h}, d{"d", params.d};
  const Device device = args.x.device();
  const auto output = [&](std::initializer_list<Dim> rows, std::initializer_list<Dim> scale) {
    check.output("rows", args.rows, rows, {DType::f8_e4m3, DType::u8}, device);
    check.output("scale", args.scale, scale, {DType::f32}, device);
  };
  if (args.x.rank() == 3) {
    output({n, h, d}, {n, h});
    params.rows = rows_of<std::uint8_t*>(args.rows, 0, 1);
    params.scale = rows_of<float*>(args.scale, 0, 1);
  } else {
    output({n, d}, {n});
    params.rows = rows_of<std::uint8_t*>(args.rows, 0);
    params.scale = rows_of<float*>(args.scale, 0);
  }
}

void check_pages(const Check& check, const QuantizeArgs& args, QuantizeParams& params) {
  const Device device = args.x.device();
  check.that(!args.rows.present() && !args.scale.present(), "rows",
             "no rows and no scale beside pages", "them too");
  check.rank("x", args.x, 2, "[n, d], for pages");
  params.pages = check_key_pages(check, "pages", args.pages, params.d, params.power_of_two, device);
  check.input("slots", args.slots, {{"n", params.n}}, {DType::i64, DType::i32}, device);
  params.slots = Slots(args.slots);
}

}  // namespace

void check_all(const Check& check, const QuantizeArgs& args, QuantizeParams& params) {
  check.that(args.x.present() && (args.x.rank() == 2 || args.x.rank() == 3), "x",
             "a tensor [n, d] or [n, h, d]",
             args.x.present() ? std::to_string(args.x.rank()) + " dimensions" : "none");
  const bool heads = args.x.rank() == 3;
  params.dtype = args.x.dtype();
  params.n = args.x.size(0);
  params.h = heads ? args.x.size(1) : 1;
  params.d = args.x.size(heads ? 2 : 1);
  params.power_of_two = args.power_of_two;
  check.dtype("x", args.x, {DType::f32, DType::f16, DType::bf16});
  check.that(params.d == 128 || params.d == 64, "x", "d = 128 or 64",
             "d = " + std::to_string(params.d));
  check.contiguous_rows("x", args.x);
  check.aligned("x", args.x, size_of(params.dtype));
  params.x = rows_of<const void*>(args.x, 0, heads ? 1 : -1);
  check.that(
      args.pages.present() == args.slots.present(), "slots",
      args.pages.present() ? "a tensor [n], which pages need" : "none, where pages are absent",
      args.pages.present() ? "none" : "a tensor");
  if (args.pages.present()) {
    check_pages(check, args, params);
  } else {
    check_rows(check, args, params);
  }
}

namespace {

struct Quantize {
  using Args = QuantizeArgs;
  using Params = QuantizeParams;
  static constexpr const auto& kContract = kQuantize;
  static constexpr auto kCpu = &CpuKernels::indexer_quantize;

  static Params check_args(const Args& args) {
    Params params;
    kQuantize.check(args, params);
    return params;
  }
  static std::span<const Backend> backends(const Args&) { return kPortable; }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params, Backend) {
    if (args.pages.present()) check_key_pages_for_gpu(check, "pages", args.pages);
    constexpr std::int64_t kMostRows = std::int64_t{INT32_MAX} * 8;
    if (params.h == 0 || params.n <= kMostRows / params.h) return;
    check.unsupported("cuda: want up to 2^34 - 8 rows, got " + std::to_string(params.n) + " * " +
                      std::to_string(params.h));
  }
  static bool empty(const Args&, const Params& params) { return params.n == 0 || params.h == 0; }
  static void check_contents(const Check&, const Args& args, const Params& params,
                             const RunOptions& options) {
    if (!args.slots.present()) return;
    check_slots(kQuantize.operation, "slots", args.slots,
                {params.pages.count, kPageRows, "pages", "row"}, options);
  }
  static void run_on_gpu(const Params& params, Backend, void*, void* stream) {
    quantize_cuda(params, stream);
  }
};

}  // namespace

Backend quantize(const QuantizeArgs& args, const RunOptions& options) {
  return enter<Quantize>(args, options);
}

}  // namespace winnow::indexer
