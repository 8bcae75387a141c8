# The kernels on a paged cache in the simulator.
winnow_simulated_kernels(simulated_paged_xl
  paged_xl/attention/attention.cc
  paged_xl/attention/attention_cases.cc
  paged_xl/attention/attention_cuda.cu
  paged_xl/cache/append.cc
  paged_xl/cache/append_cases.cc
  paged_xl/cache/append_cuda.cu
  paged_xl/cases.cc
  paged_xl/position_term/position_term.cc
  paged_xl/position_term/position_term_cases.cc
  paged_xl/position_term/position_term_cuda.cu
  paged_xl/problem.cc
  paged_xl/split.cc)
winnow_simulator_test(simulator_paged_attention_test paged_xl/attention simulated_paged_xl
  kernels/simulator_paged_attention_test.cc)
winnow_simulator_test(simulator_paged_append_test paged_xl/cache simulated_paged_xl
  kernels/simulator_paged_append_test.cc)
winnow_simulator_test(simulator_position_term_test paged_xl/position_term simulated_paged_xl
  kernels/simulator_position_term_test.cc)
