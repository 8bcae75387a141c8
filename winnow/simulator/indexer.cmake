# The wrappers' micro-kernels and the indexer's kernels in the simulator.
winnow_simulated_kernels(simulated_conformance
  simulator/conformance_barrier.cu
  simulator/conformance_basic.cu
  simulator/conformance_copy.cu
  simulator/conformance_matrix.cu
  simulator/conformance_mma.cu)
winnow_simulator_test(conformance_test device simulated_conformance
  conformance_basic_test.cc conformance_copy_test.cc conformance_mma_test.cc)

winnow_simulated_kernels(simulated_conformance_sm100 simulator/conformance_sm100.cu)
winnow_simulator_test(conformance_sm100_test device simulated_conformance_sm100 conformance_sm100_test.cc)
include(conformance_cute.cmake)

winnow_simulated_kernels(simulated_indexer
  indexer/cases.cc
  indexer/problem.cc
  indexer/backward/backward.cc
  indexer/backward/backward_cases.cc
  indexer/backward/backward_cuda.cu
  indexer/backward/backward_sm90.cu
  indexer/quantize/quantize.cc
  indexer/quantize/quantize_cases.cc
  indexer/quantize/quantize_cuda.cu
  indexer/scores/scores.cc
  indexer/scores/scores_cases.cc
  indexer/scores/scores_cuda.cu
  indexer/scores/scores_sm90.cu
  indexer/scores_paged/scores_paged.cc
  indexer/scores_paged/scores_paged_cases.cc
  indexer/scores_paged/scores_paged_cuda.cu
  indexer/scores_paged/scores_paged_sm90.cu
  indexer/topk/topk.cc
  indexer/topk/topk_cases.cc
  indexer/topk/topk_cuda.cu
  indexer/topk/topk_sm90.cu
  indexer/topk_paged/paged_problem.cc
  indexer/topk_paged/topk_paged.cc
  indexer/topk_paged/topk_paged_cases.cc
  indexer/topk_paged/topk_paged_cuda.cu
  indexer/topk_paged/topk_paged_sm90.cu
  indexer/topk_paged/topk_paged_step_cases.cc)
winnow_simulator_test(simulator_indexer_backward_test indexer/backward simulated_indexer indexer_backward_test.cc)
winnow_simulator_test(simulator_indexer_backward_cuda_test indexer/backward simulated_indexer
  indexer_backward_cuda_test.cc)
winnow_simulator_test(simulator_indexer_quantize_test indexer/quantize simulated_indexer indexer_quantize_test.cc)
winnow_simulator_test(simulator_indexer_scores_test indexer/scores simulated_indexer indexer_scores_test.cc)
winnow_simulator_test(simulator_indexer_scores_cuda_test indexer/scores simulated_indexer
  indexer_scores_cuda_test.cc)
winnow_simulator_test(simulator_indexer_scores_at_test indexer/scores simulated_indexer indexer_scores_at_test.cc)
winnow_simulator_test(simulator_indexer_scores_paged_test indexer/scores_paged simulated_indexer
  indexer_scores_paged_test.cc)
winnow_simulator_test(simulator_indexer_topk_test indexer/topk simulated_indexer indexer_topk_test.cc)
winnow_simulator_test(simulator_indexer_topk_cuda_test indexer/topk simulated_indexer
  indexer_topk_cuda_test.cc)
winnow_simulator_test(simulator_indexer_topk_paged_test indexer/topk_paged simulated_indexer
  indexer_topk_paged_test.cc)
winnow_simulator_test(simulator_indexer_topk_paged_cuda_test indexer/topk_paged simulated_indexer
  indexer_topk_paged_cuda_test.cc)
winnow_simulator_test(simulator_indexer_scores_paged_cuda_test indexer/scores_paged simulated_indexer
  indexer_scores_paged_cuda_test.cc)
