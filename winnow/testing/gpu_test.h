// What the GPU tests of several rooms share. Only for tests: needs GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include "winnow/core/backend.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::testing {

// Skipped where the backend serves no GPU, and says why.
template <Backend kBackend>
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const BackendStatus& status : backends()) {
      if (status.backend == kBackend && !status.supported) GTEST_SKIP() << status.reason;
    }
  }
};

#if WINNOW_WITH_CUDA

inline void expect_success(cudaError_t error) {
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// run(device) of the second GPU while the first is the caller's current one, which it stays.
// Skipped where there is one GPU.
template <class Run>
void expect_runs_on_second_gpu(const Run& run) {
  int count = 0, current = -1;
  expect_success(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one GPU only";
  expect_success(cudaSetDevice(0));
  run(Device{DeviceType::cuda, 1});
  expect_success(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

// A stream that waits for no other.
struct CudaStream {
  cudaStream_t stream = nullptr;
  CudaStream() { expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  RunOptions options() const { return {.stream = {stream}}; }
  void wait() const { expect_success(cudaStreamSynchronize(stream)); }
};

// What `body` enqueues on the stream, to be launched again and again.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, const Body& body,
        cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    expect_success(cudaStreamBeginCapture(stream, mode));
    body();
    cudaGraph_t graph = nullptr;
    expect_success(cudaStreamEndCapture(stream, &graph));
    expect_success(cudaGraphInstantiate(&program_, graph, 0));
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(program_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { expect_success(cudaGraphLaunch(program_, stream)); }

 private:
  cudaGraphExec_t program_ = nullptr;
};

#endif

}  // namespace winnow::testing
