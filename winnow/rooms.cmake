# The library's sources by room and by what compiles them. Tests, case tables, benchmarks and bindings are not of
# the library, and are found by their names.
#
#   no word    C++, in every build           CPU     C++, once per instruction set, in a module of its own
#   CUDA_HOST  C++, in builds with CUDA      CUDA    kernels for compute capability 8.0 and newer
#   CUDA80     the same, large ones
#   CUDA90     kernels for 9.0 and newer     SM90, SM100  kernels for these architectures alone
set(kinds CPU CUDA_HOST CUDA CUDA80 CUDA90 SM90 SM100)
macro(winnow_room room)
  cmake_parse_arguments(given "" "" "${kinds}" ${ARGN})
  foreach(kind IN ITEMS UNPARSED_ARGUMENTS ${kinds})
    list(TRANSFORM given_${kind} PREPEND ${room}/)
    list(APPEND sources_${kind} ${given_${kind}})
  endforeach()
endmacro()

winnow_room(core
  backend.cc check.cc contract.cc device.cc device_memory.cc foreign_dtype.cc interrupt.cc nearest.cc parallel.cc
    record.cc row_limits.cc slots.cc tensor.cc thread_team.cc)
winnow_room(cache  cache.cc)
winnow_room(cpu  select.cc  CPU module.cc)
winnow_room(compressor  problem.cc  CPU window_cpu.cc)
winnow_room(compressor/backward  backward.cc  CPU backward_cpu.cc  CUDA backward_cuda.cu)
winnow_room(compressor/forward  forward.cc  CPU forward_cpu.cc  CUDA forward_cuda.cu)
winnow_room(compressor/step  step.cc  CPU step_cpu.cc  CUDA step_cuda.cu)
winnow_room(expert_parallel/all_to_all  all_to_all.cc all_to_all_cpu.cc  CUDA_HOST all_to_all_cuda.cc)
winnow_room(expert_parallel/combine
  combine_cpu.cc combine_request.cc
  CPU combine_row_sum_cpu.cc
  CUDA_HOST combine_cuda.cc
  CUDA90 combine_push_cuda.cu combine_sum_cuda.cu combine_values_cuda.cu)
winnow_room(expert_parallel/cuda  CUDA_HOST calls.cc)
winnow_room(expert_parallel/dispatch
  dispatch_cpu.cc dispatch_request.cc dispatch_rows.cc dispatch_scatter_cpu.cc
  CUDA_HOST dispatch_cuda.cc dispatch_dense_cuda.cc dispatch_routing_cuda.cc dispatch_scatter_cuda.cc
  CUDA90 dispatch_count_cuda.cu dispatch_move_cuda.cu dispatch_place_cuda.cu dispatch_scatter_cuda.cu)
winnow_room(expert_parallel/exchange  exchange_cpu.cc rail_cpu.cc  CUDA90 pointer_fabric_cuda.cu)
winnow_room(expert_parallel/layer
  backend.cc descriptor.cc layer.cc rail_weights.cc regions.cc
  CUDA_HOST handshake_cuda.cc layer_cuda.cc
  CUDA90 layer_kernels_cuda.cu)
winnow_room(expert_parallel/layout  layout.cc  CUDA layout_cuda.cu)
winnow_room(expert_parallel/low_latency
  low_latency.cc low_latency_contents.cc low_latency_cpu.cc
  CUDA_HOST low_latency_cuda.cc
  CUDA90 low_latency_combine_cuda.cu low_latency_dispatch_cuda.cu)
winnow_room(expert_parallel/memory  arena.cc cuda_memory.cc layouts.cc)
winnow_room(expert_parallel/notify  notify.cc notify_cpu.cc  CUDA_HOST notify_cuda.cc  CUDA90 notify_cuda.cu)
winnow_room(expert_parallel/queue_buffers  queue_buffers.cc)
winnow_room(expert_parallel/rendezvous
  agreement.cc announcement.cc launch_environment.cc peer_watch.cc process.cc store.cc)
winnow_room(expert_parallel/routing  counts.cc placement.cc topology.cc)
winnow_room(expert_parallel/transport  call_order.cc communicator.cc deadline.cc fault.cc transport.cc untrusted.cc)
winnow_room(expert_parallel/transport/in_process  in_process.cc)
winnow_room(expert_parallel/transport/mapped  mapped_transport.cc)
winnow_room(expert_parallel/transport/nvshmem  nvshmem.cc nvshmem_library.cc nvshmem_world.cc)
winnow_room(expert_parallel/transport/shared_memory  shared_memory.cc)
winnow_room(indexer  problem.cc)
winnow_room(indexer/backward  backward.cc
  CPU backward_cpu.cc  CUDA80 backward_cuda.cu  SM90 backward_sm90.cu)
winnow_room(indexer/quantize  quantize.cc  CPU quantize_cpu.cc  CUDA quantize_cuda.cu)
winnow_room(indexer/scores  scores.cc  CPU scores_cpu.cc  CUDA80 scores_cuda.cu  SM90 scores_sm90.cu)
winnow_room(indexer/scores_paged  scores_paged.cc
  CPU scores_paged_cpu.cc  CUDA80 scores_paged_cuda.cu  SM90 scores_paged_sm90.cu)
winnow_room(indexer/topk  topk.cc  CPU topk_cpu.cc  CUDA80 topk_cuda.cu  SM90 topk_sm90.cu)
winnow_room(indexer/topk_paged  paged_problem.cc topk_paged.cc
  CPU topk_paged_cpu.cc  CUDA80 topk_paged_cuda.cu  SM90 topk_paged_sm90.cu)
winnow_room(paged_xl  problem.cc split.cc)
winnow_room(paged_xl/attention  attention.cc  CPU attention_cpu.cc  CUDA attention_cuda.cu)
winnow_room(paged_xl/cache  append.cc  CPU append_cpu.cc  CUDA append_cuda.cu)
winnow_room(paged_xl/position_term  position_term.cc  CPU position_term_cpu.cc  CUDA position_term_cuda.cu)
winnow_room(sparse_mla  problem.cc)
winnow_room(sparse_mla/backward
  backward.cc
  CPU backward_cpu.cc
  CUDA80 backward_cuda.cu
  SM90 backward_fused_fixed_sm90.cu backward_fused_sm90.cu backward_sm90.cu backward_split_sm90.cu
  SM100 backward_sm100.cu)
winnow_room(sparse_mla/decode  decode.cc  CPU decode_cpu.cc
  CUDA80 decode_cuda.cu  SM90 decode_sm90.cu)
winnow_room(sparse_mla/distribution  distribution.cc  CPU distribution_cpu.cc
  CUDA80 distribution_cuda.cu  SM90 distribution_sm90.cu)
winnow_room(sparse_mla/forward  forward.cc  CPU forward_cpu.cc
  CUDA80 forward_cuda.cu  SM90 forward_sm90.cu)
winnow_room(sparse_mla/store  store.cc  CPU store_cpu.cc  CUDA store_cuda.cu)

# A file that no room lists would silently not be built.
file(GLOB_RECURSE unlisted RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS *.cc *.cu)
list(FILTER unlisted EXCLUDE REGEX
  "^(python|simulator)/|(^|/)testing/|(^|/|_)(test|bench|cases|py|soak)\\.(cc|cu)$|nvshmem_module\\.cu$")
foreach(kind IN ITEMS UNPARSED_ARGUMENTS ${kinds})
  list(REMOVE_ITEM unlisted ${sources_${kind}})
endforeach()
if(unlisted)
  message(FATAL_ERROR "winnow/rooms.cmake does not list ${unlisted}")
endif()
