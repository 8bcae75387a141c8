// The list of operations. Each room gives its own entry.
#include "winnow/cpu/kernels.h"
#include "winnow/testing/operation.h"

namespace winnow {

#define WINNOW_DECLARE_(family, operation, params) \
  namespace family {                               \
  testing::Operation operation##_operation();      \
  }
WINNOW_CPU_KERNELS(WINNOW_DECLARE_)
#undef WINNOW_DECLARE_

namespace expert_parallel {
testing::Operation layout_operation();
testing::Operation notify_operation();
testing::Operation low_latency_operation();
testing::Operation all_to_all_operation();
}  // namespace expert_parallel

namespace testing {

const std::vector<Operation>& operations() {
  static const std::vector<Operation> list = {
#define WINNOW_ENTRY_(family, operation, params) family::operation##_operation(),
      WINNOW_CPU_KERNELS(WINNOW_ENTRY_)
#undef WINNOW_ENTRY_
          expert_parallel::layout_operation(),
      expert_parallel::notify_operation(),
      expert_parallel::all_to_all_operation(),
      expert_parallel::low_latency_operation(),
  };
  return list;
}

}  // namespace testing
}  // namespace winnow
