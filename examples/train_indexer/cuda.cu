// The Machine of a GPU: cuBLAS for matrix products, a warp for each row.
#include <stdexcept>
#include <string>

#include "machine.h"
#include <cublas_v2.h>
#include <cuda_runtime.h>

namespace {

constexpr int kWarps = 8;  // of a block

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(cublasGetStatusString(status));
}

template <class Operation>
__global__ void rows_kernel(std::int64_t rows, Operation operation) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row < rows) operation(row, Lane{static_cast<int>(threadIdx.x % 32), 32});
}

// All work runs on the default stream, Winnow's calls and copies included.
class CudaMachine : public Machine {
 public:
  CudaMachine() {
    check(cublasCreate(&blas_));
    check(cublasSetMathMode(blas_, CUBLAS_TF32_TENSOR_OP_MATH));
  }
  ~CudaMachine() override { cublasDestroy(blas_); }

  winnow::Device device() const override { return {winnow::DeviceType::cuda, 0}; }

  // cuBLAS matrices are column-major, so it computes the transposed product, c' = b' a'.
  void multiply(const winnow::ConstTensorView& a, const winnow::ConstTensorView& b,
                const winnow::TensorView& c, bool add) override {
    const float one = 1, before = add ? 1 : 0;
    check(cublasSgemm(blas_, transposed(b), transposed(a), static_cast<int>(c.size(1)),
                      static_cast<int>(c.size(0)), static_cast<int>(a.size(1)), &one,
                      static_cast<const float*>(b.data()), row_length(b),
                      static_cast<const float*>(a.data()), row_length(a), &before,
                      static_cast<float*>(c.data()), row_length(c)));
  }

  void for_each_row(std::int64_t rows, const RowOperation& operation) override {
    const unsigned blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
    std::visit(
        [=](const auto& work) {
          rows_kernel<<<blocks, 32 * kWarps>>>(rows, work);
          check(cudaGetLastError());
        },
        operation);
  }

  void wait() override { check(cudaDeviceSynchronize()); }

 private:
  static cublasOperation_t transposed(const winnow::ConstTensorView& view) {
    return view.stride(1) == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
  }
  static int row_length(const winnow::ConstTensorView& view) {
    return static_cast<int>(view.stride(1) == 1 ? view.stride(0) : view.stride(1));
  }

  cublasHandle_t blas_ = nullptr;
};

}  // namespace

std::unique_ptr<Machine> make_cuda_machine() { return std::make_unique<CudaMachine>(); }
