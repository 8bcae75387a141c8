#include "winnow/expert_parallel/cuda/calls.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "winnow/core/error.h"
#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/memory/layouts.h"

namespace winnow::expert_parallel {
namespace {

// As Communicator words its own: "rank 0 waited 30.0 s for the counts of rank 2 (epoch 7, seen 6):
// thread, running". `texts` name the phases.
FaultRecord fault_record(const FaultReport& report, std::span<const PhaseText> texts,
                         const Transport& transport) {
  const FaultNotice& notice = report.notice;
  const auto text = std::ranges::find(texts, notice.phase, &PhaseText::phase);
  FaultRecord record;
  record.operation = text == texts.end() ? "expert_parallel" : text->operation;
  record.phase = text == texts.end() ? "a word" : text->text;
  record.rank = report.reporter;
  record.peer = notice.peer;
  record.waited_for = notice.waited_for;
  record.seen = notice.seen;
  record.text = "rank " + std::to_string(report.reporter);
  if (notice.phase == Phase::memory) {
    record.code = ErrorCode::resource;
    record.text += ": out of memory in the call";
    return record;
  }
  if (notice.phase == Phase::interrupted) {
    record.reason = ErrorReason::interrupted;
    record.phase = "the end of an interrupt";
    record.text += " was interrupted";
    return record;
  }
  record.text +=
      " waited " + to_seconds(std::chrono::nanoseconds(notice.elapsed_ns)) + " for " + record.phase;
  const std::string wanted = std::to_string(notice.waited_for), seen = std::to_string(notice.seen);
  if (notice.phase == Phase::blocks) {
    record.text += ", of which " + seen + " of " + wanted + " run: other work holds its SMs";
    return record;
  }
  record.text +=
      " of rank " + std::to_string(notice.peer) + " (epoch " + wanted + ", seen " + seen + ")";
  if (notice.peer >= 0 && notice.peer < transport.world_size()) {
    record.text += ": " + transport.describe_peer(notice.peer);
    const bool gone = transport.peer_gone(notice.peer);
    record.reason = gone ? ErrorReason::peer_gone : ErrorReason::absent;
  }
  return record;
}

}  // namespace

CudaCalls::CudaCalls(std::shared_ptr<Transport> transport, const LayerView& view, Device device,
                     std::string_view creation, std::vector<PhaseText> texts)
    : transport_(std::move(transport)),
      view_(view),
      texts_(std::move(texts)),
      device_(device),
      operation_(creation) {
  if (transport_->fabric() == nullptr) {
    throw Error(ErrorCode::unsupported, operation_,
                "the transport " + transport_->name() + " serves no GPUs");
  }
  const DeviceGuard guard(device_);
  last_ = make_event();
  fault_signalled_ = make_event();
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  fault_stream_.reset(stream);
}

CudaCalls::Event CudaCalls::make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
  return Event(event);
}

CudaCalls::~CudaCalls() {
  peers_.reset();
  if (any_call_) {
    try {
      free_after(last_.get());
      // Kernels that are under way still write what other ranks wait for.
      if (cudaEventQuery(last_.get()) == cudaErrorNotReady)
        keep_until_freed(device_, transport_->presence());
    } catch (const Error&) {  // the GPU is lost, and its memory with it
    }
  }
  page_.retire(any_call_ ? last_.release() : nullptr);
}

int CudaCalls::count_ranks() {
  const int ranks = transport_->ranks_on_gpu();
  if (ranks > kMostRanksOnGpu) {
    throw Error(ErrorCode::unsupported, operation_, "device",
                "at most " + std::to_string(kMostRanksOnGpu) + " ranks on a GPU",
                std::to_string(ranks) + " on " + to_string(device_));
  }
  shares_gpu_ = ranks > 1;
  return ranks;
}

// ---- A call.

void CudaCalls::begin(std::string_view operation, Stream stream) {
  operation_ = operation;
  throw_fault();
  if (!broken_.empty()) throw Error(ErrorCode::internal, operation_, broken_);
  if (shares_gpu_ && stream.handle == nullptr) {
    throw Error(ErrorCode::invalid_argument, operation_, "stream",
                "one of this rank's own, since other ranks share " + to_string(device_),
                "the default stream");
  }
  stream_ = static_cast<cudaStream_t>(stream.handle);
  capturing_ = in_capture(device_, stream);
  if (!capturing_) {
    check(cudaStreamGetId(stream_, &stream_id_), "the stream");
    if (any_call_ && stream_id_ != last_stream_) {
      check(cudaStreamWaitEvent(stream_, last_.get()), "the order of streams");
    }
  }
  in_call_ = true;
  ++number_;
}

void CudaCalls::wait_for(const std::uint64_t& call, std::uint64_t number) {
  constexpr std::chrono::milliseconds kLookAtStream{20};
  using Clock = std::chrono::steady_clock;
  const auto there = [&] { return load_acquire(&call) == number; };
  auto next_look = Clock::now() + kLookAtStream;
  Interrupts interrupts;
  while (!there()) {
    throw_fault();
    try {
      interrupts.look();
    } catch (...) {
      break_for(Phase::interrupted);
      throw;
    }
    std::this_thread::yield();  // a sleep would be longer than what is left to wait for
    if (capturing_ || Clock::now() < next_look) continue;  // a recording cannot be looked at
    next_look = Clock::now() + kLookAtStream;
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaErrorNotReady) continue;
    check(state, "the stream");
    throw_fault();
    if (there()) break;
    check(cudaErrorUnknown, "the kernels ended without a report");
  }
}

void CudaCalls::end() {
  in_call_ = false;
  if (capturing_) return;
  check(cudaEventRecord(last_.get(), stream_), "the end of the call");
  last_stream_ = stream_id_;
  any_call_ = true;
}

void CudaCalls::wait_for_stream(const char* what) {
  Interrupts interrupts;
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) return check(state, what);
    try {
      interrupts.look();
    } catch (...) {
      break_for(Phase::interrupted);
      throw;
    }
    std::this_thread::yield();
  }
}

void CudaCalls::wait_for_last() const {
  Interrupts interrupts;
  while (any_call_ && cudaEventQuery(last_.get()) == cudaErrorNotReady) {
    interrupts.look();
    std::this_thread::yield();
  }
}

// For a call that has thrown.
void CudaCalls::leave() noexcept {
  if (!in_call_) return;
  try {
    end();
  } catch (const Error&) {  // the GPU is lost
  }
}

// ---- What goes wrong.

void CudaCalls::throw_fault() {
  if (!fault_) {
    if (std::atomic_ref(fault_report_->state).load(std::memory_order_acquire) == 0) return;
    fault_ = fault_record(*fault_report_, texts_, *transport_);
    signal_fault();
  }
  expert_parallel::throw_fault(*fault_, transport_->rank());
}

void CudaCalls::fail_without_memory() {
  break_for(Phase::memory);
  expert_parallel::throw_fault(*fault_, transport_->rank());
}

void CudaCalls::fail_without_host_memory() {
  if (!capturing_) fail_without_memory();
  throw Error(ErrorCode::resource, operation_, "out of memory in the call");
}

// What no kernel has found.
void CudaCalls::break_for(Phase phase) {
  FaultReport report;
  report.reporter = transport_->rank();
  report.notice.phase = phase;
  report.notice.peer = report.reporter;
  fault_ = fault_record(report, texts_, *transport_);
  signal_fault(report.notice);
}

// Unless kernels have told everybody. On a stream of its own, since that of the call may be held up
// or record a graph. Where it fails, the waits of the other nodes expire by themselves.
void CudaCalls::signal_fault(const FaultNotice& found) {
  if (view_.topology.nodes == 1 && found.phase == Phase::none) return;
  const DeviceGuard guard(device_);
  const cudaStream_t stream = fault_stream_.get();
  const cudaEvent_t signalled = fault_signalled_.get();
  if (transport_->fabric()->signal_fault(view_, fault_->rank, found, stream) == cudaSuccess &&
      cudaEventRecord(signalled, stream) == cudaSuccess) {
    free_after(signalled);
    // They know before this rank makes a new layer.
    const Deadline deadline(std::chrono::milliseconds(100));
    while (cudaEventQuery(signalled) == cudaErrorNotReady && !deadline.expired()) {
      std::this_thread::yield();
    }
  }
}

void CudaCalls::check(int cuda_error, const char* what) {
  if (cuda_error == cudaSuccess) return;
  cudaGetLastError();  // it is told here, and nowhere else
  const auto error = static_cast<cudaError_t>(cuda_error);
  broken_ =
      "rank " + std::to_string(transport_->rank()) + ": " + what + ": " + cudaGetErrorString(error);
  throw Error(error == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::internal,
              operation_, broken_);
}

}  // namespace winnow::expert_parallel
