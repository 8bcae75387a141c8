#include "winnow/expert_parallel/dispatch/dispatch_scatter_cuda.h"

#include <cstring>
#include <numeric>
#include <string>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/dispatch/dispatch_request.h"
#include "winnow/expert_parallel/dispatch/dispatch_scatter.h"

namespace winnow::expert_parallel {
namespace {

// What a kernel of this call has found, when the stream is through with it.
ScatterFinding read_finding(CudaLayer& layer) {
  layer.calls().wait_for_stream("the check of the scattered rows");
  ScatterFinding finding;
  std::memcpy(static_cast<void*>(&finding), layer.handshake().report_words().data(),
              sizeof finding);
  return finding;
}

// An exchange of its own, which the host waits for.
void meet(CudaLayer& layer, Stream stream, const Header& header, const std::byte* table,
          std::int64_t table_bytes) {
  layer.begin(kDispatch, stream);
  layer.handshake().exchange(kCountsPhase, header, nullptr, table, table_bytes, Report::headers);
  layer.handshake().wait_report();
}

}  // namespace

void scatter_rows(CudaLayer& layer, const ConstTensorView& table, Stream stream,
                  ScatterParams params, std::span<const std::int64_t> wanted_rows,
                  std::span<const std::int32_t> tokens, std::span<const std::int64_t> table_rows) {
  check_table_sizes(tokens, table_rows);
  const auto rank = static_cast<std::size_t>(layer.place().rank);
  const std::int64_t topk = layer.place().config.topk, own_pairs = params.tokens * topk;
  const auto begin_of = [&](std::int64_t of) {
    return std::accumulate(wanted_rows.begin(), wanted_rows.begin() + of, std::int64_t{0});
  };
  const std::int64_t first =
      table.size(0) == params.tokens
          ? 0
          : std::accumulate(tokens.begin(), tokens.begin() + rank, std::int64_t{0});
  params.stride = table.stride(0);
  params.given = static_cast<const std::int32_t*>(table.data()) + first * params.stride;
  layer.calls().check(
      cudaMemsetAsync(params.owners.data[layer.place().local()], 0xff,
                      static_cast<std::size_t>(wanted_rows[rank]) * sizeof(std::uint64_t),
                      layer.calls().stream()),
      "clear the owners of rows");
  layer.calls().check(launch_translate(params, layer.calls().stream()), "translate");
  Header header;
  header.options.call = Call::scatter_rows;
  if (const ScatterFinding bad = read_finding(layer); bad.bad != 0) {
    const std::int64_t begin = begin_of(bad.expert_rank);
    header.refuse(bad_row(
        std::to_string(begin) + " to " +
            std::to_string(begin + wanted_rows[static_cast<std::size_t>(bad.expert_rank)] - 1),
        std::to_string(bad.value), bad.pair, static_cast<int>(topk)));
  }
  meet(layer, stream, header, reinterpret_cast<const std::byte*>(params.rows),
       own_pairs * std::int64_t(sizeof(std::int32_t)));

  layer.calls().check(launch_claim(params, layer.calls().stream()), "claim");
  Header verdict;
  verdict.options.call = Call::scatter_check;
  if (const ScatterFinding bad = read_finding(layer); bad.bad != 0) {
    verdict.refuse(bad_row(
        "every row once", "row " + std::to_string(begin_of(bad.expert_rank) + bad.value) + " again",
        bad.pair, static_cast<int>(topk)));
    verdict.subject = static_cast<std::int32_t>(bad.rank);
  }
  meet(layer, stream, verdict, nullptr, 0);
}

}  // namespace winnow::expert_parallel
