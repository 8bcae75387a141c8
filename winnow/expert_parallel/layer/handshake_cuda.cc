#include "winnow/expert_parallel/layer/handshake_cuda.h"

#include <string>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/exchange/exchange_cuda.h"

namespace winnow::expert_parallel {

Handshake::Handshake(const Place& place, LayerView& view, const FabricKernels& fabric,
                     Regions& regions, CudaCalls& calls)
    : place_(place), view_(view), fabric_(fabric), regions_(regions), calls_(calls) {
  const std::int64_t world = place_.world();
  report_words_ = static_cast<std::size_t>(4 * world + 2 * place_.map.per_rank() + 64);
  calls_.make_reports<ReportView>({&host_report_, &host_deferred_},
                                  {&view_.report, &view_.deferred}, view_,
                                  [&](Tables& tables, ReportView& report) {
                                    tables.add(report.report, 1);
                                    tables.add(report.headers, world);
                                    tables.add(report.findings, world);
                                    tables.add(report.wanted, world);
                                    tables.add(report.words, std::int64_t(report_words_));
                                  });
}

void Handshake::begin() {
  own_header_ = {};
  others_go_on_ = false;
}

void Handshake::exchange(Phase phase, const Header& header, const std::int32_t* counts,
                         const std::byte* table, std::int64_t table_bytes, Report report) {
  own_header_ = header;
  const bool capturing = calls_.capturing();
  if (capturing && header.refusal != 0) return;  // the recording ends with the Error
  if (capturing && report != Report::none) {
    throw Error(ErrorCode::internal, calls_.operation(), "a graph cannot wait for a report");
  }
  ExchangeParams params;
  params.view = view_;
  params.header = header;
  const Call call = header.options.call;
  const bool waits = report == Report::headers || report == Report::more;
  if (call == Call::dispatch || call == Call::cached_dispatch) regions_.sign(params.header.options);
  params.counts = counts;
  params.table = table;
  params.table_bytes = place_.nodes() > 1 ? table_bytes : 0;
  params.phase = phase;
  params.call = calls_.number();
  params.waits = waits || header.refusal != 0;
  params.reports = params.waits || report == Report::later;
  params.completes = report != Report::more;
  if (params.reports) read_offers();  // before kernels write the next report
  calls_.check(fabric_.exchange(params, calls_.stream()), "exchange");
  if (report == Report::later && !params.waits) regions_.await(calls_.number());
  others_go_on_ = !capturing;
}

void Handshake::wait_report() {
  if (calls_.capturing()) {
    if (own_header_.subject < 0) own_header_.subject = place_.rank;
    throw_refusals(calls_.operation(), std::span(&own_header_, 1));
  }
  calls_.wait_for(host_report_.report->call, calls_.number());
  if (host_report_.report->refused != 0) throw_received(host_report_, false, calls_.number());
}

// The offers of a refused call are dropped. They are not wrong, but all ranks must keep the same
// ones, and a rank that refused the call has not awaited its report.
void Handshake::read_offers() {
  const std::uint64_t call = regions_.take_awaited();
  if (call == 0) return;
  calls_.wait_for(host_report_.report->call, call);
  if (host_report_.report->refused == 0) regions_.keep(call, received());
}

// The headers that were received, with an error for each rank whose indices kernels have found to
// be invalid. With `deferred` these are indices that do not refuse the call but raise an error in a
// later one, since the host did not wait.
std::vector<Header> Handshake::refusals(const ReportView& received, bool deferred) const {
  std::vector<Header> headers(received.headers, received.headers + place_.world());
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    const Findings& found = received.findings[rank];
    Header& header = headers[rank];
    if (found.bad == 0 || header.refusal != 0) continue;
    if ((header.options.worst_case_rows > 0) != deferred) continue;
    header.refuse(
        Error(ErrorCode::invalid_argument, calls_.operation(), "expert_indices",
              "-1 to " + std::to_string(place_.map.experts),
              std::to_string(found.value()) + " for token " + std::to_string(found.token)));
  }
  return headers;
}

void Handshake::throw_received(const ReportView& received, bool deferred, std::uint64_t call) {
  const std::vector<Header> headers = refusals(received, deferred);
  if (!deferred) regions_.refused(call, headers);
  throw_refusals(calls_.operation(), headers);
}

void Handshake::throw_deferred() {
  calls_.throw_fault();
  CallReport& report = *host_deferred_.report;
  calls_.throw_deferred(report.call, [&](std::uint64_t call) {
    if (report.overflow == 0) return throw_received(host_deferred_, report.refused == 0, call);
    for (int rank = 0; rank < place_.world(); ++rank) {
      const std::int64_t wanted = host_deferred_.wanted[rank];
      if (wanted <= report.worst_case_rows) continue;
      throw Error(ErrorCode::invalid_argument, calls_.operation(),
                  "rank " + std::to_string(rank) + ": worst_case_rows",
                  std::to_string(wanted) + " or more", std::to_string(report.worst_case_rows));
    }
  });
}

}  // namespace winnow::expert_parallel
