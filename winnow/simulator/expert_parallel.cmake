# The all-to-all in the simulator: its layers as they are, over the transport of one process.
list(APPEND WINNOW_EXPERT_PARALLEL
  expert_parallel/all_to_all/all_to_all.cc
  expert_parallel/all_to_all/all_to_all_cases.cc
  expert_parallel/all_to_all/all_to_all_cuda.cc
  expert_parallel/combine/combine_cases.cc
  expert_parallel/combine/combine_cuda.cc
  expert_parallel/combine/combine_push_cuda.cu
  expert_parallel/combine/combine_request.cc
  expert_parallel/combine/combine_sum_cuda.cu
  expert_parallel/combine/combine_values_cuda.cu
  expert_parallel/cuda/calls.cc
  expert_parallel/dispatch/dispatch_cases.cc
  expert_parallel/dispatch/dispatch_count_cuda.cu
  expert_parallel/dispatch/dispatch_cuda.cc
  expert_parallel/dispatch/dispatch_dense_cuda.cc
  expert_parallel/dispatch/dispatch_move_cuda.cu
  expert_parallel/dispatch/dispatch_place_cuda.cu
  expert_parallel/dispatch/dispatch_request.cc
  expert_parallel/dispatch/dispatch_routing_cuda.cc
  expert_parallel/dispatch/dispatch_rows.cc
  expert_parallel/dispatch/dispatch_scatter_cuda.cc
  expert_parallel/dispatch/dispatch_scatter_cuda.cu
  expert_parallel/dispatch/dispatch_scatter_cpu.cc
  expert_parallel/exchange/exchange_cpu.cc
  expert_parallel/exchange/pointer_fabric_cuda.cu
  expert_parallel/exchange/rail_cpu.cc
  expert_parallel/layer/backend.cc
  expert_parallel/layer/descriptor.cc
  expert_parallel/layer/handshake_cuda.cc
  expert_parallel/layer/layer.cc
  expert_parallel/layer/layer_cuda.cc
  expert_parallel/layer/layer_kernels_cuda.cu
  expert_parallel/layer/rail_weights.cc
  expert_parallel/layer/regions.cc
  expert_parallel/layout/layout.cc
  expert_parallel/layout/layout_cases.cc
  expert_parallel/layout/layout_cuda.cu
  expert_parallel/low_latency/low_latency.cc
  expert_parallel/low_latency/low_latency_cases.cc
  expert_parallel/low_latency/low_latency_combine_cuda.cu
  expert_parallel/low_latency/low_latency_contents.cc
  expert_parallel/low_latency/low_latency_cuda.cc
  expert_parallel/low_latency/low_latency_dispatch_cuda.cu
  expert_parallel/memory/arena.cc
  expert_parallel/memory/cuda_memory.cc
  expert_parallel/memory/layouts.cc
  expert_parallel/notify/notify.cc
  expert_parallel/notify/notify_cases.cc
  expert_parallel/notify/notify_cuda.cc
  expert_parallel/notify/notify_cuda.cu
  expert_parallel/queue_buffers/queue_buffers.cc
  expert_parallel/rendezvous/agreement.cc
  expert_parallel/rendezvous/announcement.cc
  expert_parallel/rendezvous/process.cc
  expert_parallel/rendezvous/store.cc
  expert_parallel/routing/counts.cc
  expert_parallel/routing/placement.cc
  expert_parallel/routing/topology.cc
  expert_parallel/testing/all_to_all_check.cc
  expert_parallel/testing/all_to_all_problem.cc
  expert_parallel/testing/comparisons.cc
  expert_parallel/testing/low_latency_problem.cc
  expert_parallel/testing/notify_problem.cc
  expert_parallel/testing/place.cc
  expert_parallel/testing/ranks.cc
  expert_parallel/transport/call_order.cc
  expert_parallel/transport/communicator.cc
  expert_parallel/transport/deadline.cc
  expert_parallel/transport/fault.cc
  expert_parallel/transport/in_process/in_process.cc
  expert_parallel/transport/mapped/mapped_transport.cc
  expert_parallel/transport/transport.cc
  expert_parallel/transport/untrusted.cc
  simulator/testing/one_process.cc
  simulator/testing/rank_threads.cc)
winnow_simulated_kernels(simulated_expert_parallel ${WINNOW_EXPERT_PARALLEL})
winnow_simulator_test(simulator_layout_test expert_parallel/layout simulated_expert_parallel
  kernels/simulator_layout_test.cc)
winnow_simulator_test(simulator_notify_test expert_parallel/notify simulated_expert_parallel
  kernels/simulator_notify_test.cc)
winnow_simulator_test(simulator_all_to_all_test expert_parallel/all_to_all simulated_expert_parallel
  kernels/simulator_all_to_all_test.cc)
winnow_simulator_test(simulator_low_latency_test expert_parallel/low_latency simulated_expert_parallel
  kernels/simulator_low_latency_test.cc)
winnow_simulator_test(simulator_absence_test expert_parallel/transport simulated_expert_parallel
  kernels/simulator_absence_test.cc)
add_executable(sweep_local kernels/sweep_local.cc)
winnow_simulate(sweep_local)
target_link_libraries(sweep_local PRIVATE simulator_testing simulated_expert_parallel GTest::gmock)
target_compile_definitions(sweep_local PRIVATE WINNOW_SOURCE_DIR="${winnow}")
