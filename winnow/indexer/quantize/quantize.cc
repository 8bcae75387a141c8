#include "winnow/indexer/quantize/quantize.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/quantize/quantize_contract.h"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kQuantize.operation;

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

void check_for_cuda(const Check& check, const QuantizeArgs& args, const QuantizeParams& params) {
  if (args.pages.present()) check_key_pages_for_gpu(check, "pages", args.pages);
  constexpr std::int64_t kMostRows = std::int64_t{INT32_MAX} * 8;
  if (params.h == 0 || params.n <= kMostRows / params.h) return;
  check.unsupported("cuda: want up to 2^34 - 8 rows, got " + std::to_string(params.n) + " * " +
                    std::to_string(params.h));
}

Backend run(const QuantizeArgs& args, const RunOptions& options) {
  const Check check(kOperation);
  QuantizeParams params;
  kQuantize.check(args, params);
  const Device device = args.x.device();
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, device, options, kImplemented);
  if (backend == Backend::cuda) check_for_cuda(check, args, params);
  if (options.dry_run) return backend;
  kQuantize.apart(args);
  if (params.n == 0 || params.h == 0) return backend;
  if (args.slots.present()) {
    check_slots(kOperation, "slots", args.slots, {params.pages.count, kPageRows, "pages", "row"},
                options);
  }
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_quantize, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(device);
    quantize_cuda(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend quantize(const QuantizeArgs& args, const RunOptions& options) {
  return recorded(kQuantize, args, options, run);
}

}  // namespace winnow::indexer
