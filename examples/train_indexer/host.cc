// The Machine of the CPU: Eigen for matrix products, a loop over the rows.
#include "machine.h"
#include <Eigen/Core>

namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ColumnMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;

class HostMachine : public Machine {
 public:
  winnow::Device device() const override { return {}; }

  void multiply(const winnow::ConstTensorView& a, const winnow::ConstTensorView& b,
                const winnow::TensorView& c, bool add) override {
    Eigen::Map<RowMajor> result(static_cast<float*>(c.data()), c.size(0), c.size(1));
    as_matrix(a, [&](const auto& left) {
      as_matrix(b, [&](const auto& right) {
        if (add) {
          result.noalias() += left * right;
        } else {
          result.noalias() = left * right;
        }
      });
    });
  }

  void for_each_row(std::int64_t rows, const RowOperation& operation) override {
    std::visit(
        [rows](const auto& work) {
          for (std::int64_t row = 0; row < rows; ++row) work(row, Lane{});
        },
        operation);
  }

  void wait() override {}

 private:
  // A transposed view of a dense matrix is a dense column-major matrix.
  template <class Use>
  static void as_matrix(const winnow::ConstTensorView& view, const Use& use) {
    const float* data = static_cast<const float*>(view.data());
    if (view.stride(1) == 1) {
      use(Eigen::Map<const RowMajor>(data, view.size(0), view.size(1)));
    } else {
      use(Eigen::Map<const ColumnMajor>(data, view.size(0), view.size(1)));
    }
  }
};

}  // namespace

std::unique_ptr<Machine> make_host_machine() { return std::make_unique<HostMachine>(); }
