// Conformance: arithmetic, global and shared memory, and exchanges in a warp.
#include <cuda_runtime.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {
namespace {

constexpr device::Runtime kRuntime{"conformance", "sm90"};
constexpr int kThreads = 128;

// in: x [128], y [128] f32; a [128][4], b [128][4] words of bf16; number [128], divisor [128].
// out: [128][12].
__global__ void math_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  const float x = __uint_as_float(in[t]), y = __uint_as_float(in[kThreads + t]);
  const uint4 a = reinterpret_cast<const uint4*>(in + 2 * kThreads)[t];
  const uint4 b = reinterpret_cast<const uint4*>(in + 6 * kThreads)[t];
  const std::uint32_t number = in[10 * kThreads + t], divisor = in[11 * kThreads + t];
  std::uint32_t* const to = out + 12 * t;
  to[0] = __float_as_uint(device::ex2(x));
  to[1] = __float_as_uint(device::relu(x));
  to[2] = device::pack_bf16(x, y);
  to[3] = __float_as_uint(device::dot_bf16x8(a, b));
  to[4] = __float_as_uint(device::log2_add(x, y));
  to[5] = device::ceil_div(device::forget(number), device::keep_in_register(divisor));
  const device::FastDivmod::Result divided = device::FastDivmod(divisor).divide(number);
  to[6] = divided.quotient;
  to[7] = divided.remainder;
  to[8] = __float_as_uint(device::infinity());
  to[9] = __float_as_uint(device::negative_infinity());
  to[10] = device::any_sign(device::any_sign(x, y, __uint_as_float(number)), y, x) >> 31;
  to[11] = device::select_bytes<0x84fb>(a.x, b.x);
}

// in: x [128][4] f32; four f8_e4m3 [128]; a [128], b [128], two bf16 each.
// out: [128][15].
__global__ void narrow_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  float x[4], wide[4];
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(in[4 * t + i]);
  const std::uint32_t packed = in[4 * kThreads + t];
  device::unpack_f8(packed, wide);
  std::uint32_t* const to = out + 15 * t;
  to[0] = device::pack_f8(x);
  for (int i = 0; i < 4; ++i) to[1 + i] = __float_as_uint(wide[i]);
  to[5] = device::multiply_bf16x2(in[5 * kThreads + t], in[6 * kThreads + t]);
  to[6] = device::select_bytes<0x4140>(packed);
  to[7] = device::select_bytes<0x0123>(packed);
  to[8] = device::select_bytes<0xb38a>(packed);
  to[9] = device::pack_f16(x[0], x[1]);
  const float2 halves = device::unpack_f16(packed);
  to[10] = __float_as_uint(halves.x), to[11] = __float_as_uint(halves.y);
  const uint2 widened = device::widen_f8(packed);
  to[12] = widened.x, to[13] = widened.y;
  to[14] = device::multiply_f16x2(packed & 0x7bff7bffu, in[5 * kThreads + t] & 0x7bff7bffu);
}

// in: [128][4]. out: [128][20], loads in every way; [128][4] by a streaming store; [4] words of the
// whole system; [1] whether time goes on; [2] words of the GPU.
__global__ void memory_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  const std::uint64_t before = device::globaltimer();
  const uint4 once = device::load_once(in + 4 * t), again = device::load_again(in + 4 * t);
  std::uint32_t* const to = out + 20 * t;
  to[0] = once.x, to[1] = once.y, to[2] = once.z, to[3] = once.w;
  to[4] = again.x, to[5] = again.y, to[6] = again.z, to[7] = again.w;
  const auto* word = reinterpret_cast<const std::int32_t*>(in) + 4 * t;
  // Even threads load by load_if(); odd ones pass it the word, which load_now() has loaded.
  to[8] = static_cast<std::uint32_t>(
      device::load_if(t % 2 == 0, word, t % 2 == 0 ? 0 : device::load_now(word)));
  to[9] = __float_as_uint(device::load_now(reinterpret_cast<const float*>(in) + 4 * t + 1));
  const float2 two = device::load_now(reinterpret_cast<const float2*>(in) + 2 * t + 1);
  to[10] = __float_as_uint(two.x), to[11] = __float_as_uint(two.y);
  to[12] = device::ld_relaxed_gpu(in + 4 * t + 2);
  to[13] = to[14] = to[15] = 0;
  const float4 four = device::load_now(reinterpret_cast<const float4*>(in) + t);
  to[16] = __float_as_uint(four.x), to[17] = __float_as_uint(four.y);
  to[18] = __float_as_uint(four.z), to[19] = __float_as_uint(four.w);
  device::store_streaming(out + 20 * kThreads + 4 * t, once.w, once.z, once.y, once.x);
  if (t == 0) {
    auto* const words = reinterpret_cast<std::uint64_t*>(out + 24 * kThreads);
    device::st_relaxed_sys(words, (std::uint64_t{once.y} << 32) | once.x);
    device::st_release_sys(words + 1, device::ld_acquire_sys(words) + 1);
    out[24 * kThreads + 4] = device::globaltimer() >= before;
    device::st_release_gpu(out + 24 * kThreads + 5, once.z);
    out[24 * kThreads + 6] = device::ld_acquire_gpu(out + 24 * kThreads + 5);
  }
}

// A block hands 128 words to the next one, whose threads add 1 to them, in every way.
constexpr int kHandovers = 5;
template <int kWay>
__device__ void tell(std::uint32_t* flag) {
  auto* const wide = reinterpret_cast<std::uint64_t*>(flag);
  if constexpr (kWay == 0) {
    device::st_release_gpu(flag, 1);
  } else if constexpr (kWay == 1) {
    device::st_release_sys(wide, 1);
  } else if constexpr (kWay == 2) {
    __threadfence_system();
    device::st_relaxed_sys(wide, 1);
  } else if constexpr (kWay == 3) {
    __threadfence();
    device::reduce_add<1>(flag);
  } else {
    __threadfence();
    *static_cast<volatile std::uint32_t*>(flag) = 1;
  }
}
template <int kWay>
__device__ void wait_to_be_told(std::uint32_t* flag) {
  auto* const wide = reinterpret_cast<std::uint64_t*>(flag);
  if constexpr (kWay == 0 || kWay == 4) {
    while (device::ld_acquire_gpu(flag) == 0) continue;
  } else if constexpr (kWay == 1 || kWay == 2) {
    while (device::ld_acquire_sys(wide) == 0) continue;
  } else {
    while (device::ld_relaxed_gpu(flag) == 0) continue;
    __threadfence();
  }
}
template <int kWay>
__device__ void hand_over(std::uint32_t* words, std::uint32_t* flags) {
  const unsigned t = threadIdx.x;
  if (blockIdx.x == kWay + 1) {
    if (t == 0) wait_to_be_told<kWay>(flags + 2 * kWay);
    __syncthreads();
    words[t] += 1;
  }
  if (blockIdx.x == kWay) {
    __syncthreads();
    if (t == 0) tell<kWay>(flags + 2 * kWay);
  }
}

// in: [128]. out: [128] one more for each handover, [2 * kHandovers] flags, which are 0.
__global__ void handover_kernel(const std::uint32_t* in, std::uint32_t* out) {
  std::uint32_t* const flags = out + kThreads;
  if (blockIdx.x == 0) out[threadIdx.x] = in[threadIdx.x];
  hand_over<0>(out, flags);
  hand_over<1>(out, flags);
  hand_over<2>(out, flags);
  hand_over<3>(out, flags);
  hand_over<4>(out, flags);
}

// in: [128][4] f32. out: [1] count, [1] sum, [2] unused, [4] sums, [4] sums, [2] 64-bit sums of
// bits.
__global__ void reductions_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < 16) out[t] = 0;
  __syncthreads();
  const float4 value = reinterpret_cast<const float4*>(in)[t];
  device::reduce_add<3>(out);
  device::reduce_add(reinterpret_cast<float*>(out + 1), value.x);
  device::reduce_add(reinterpret_cast<float*>(out + 4), value);
  device::reduce_add(reinterpret_cast<float*>(out + 8), value, device::policy_evict_last());
  const unsigned long long bits = (static_cast<unsigned long long>(t) << 30) + in[4 * t];
  device::reduce_add(reinterpret_cast<unsigned long long*>(out + 12), bits,
                     device::policy_evict_normal());
  device::reduce_add(reinterpret_cast<unsigned long long*>(out + 14), bits);
}

// in: [128]. out: [128][16], what the thread `t ^ 1` stored in every size, and twice its last 16
// bytes; [2] handed over.
__global__ void shared_kernel(const std::uint32_t* in, std::uint32_t* out) {
  WINNOW_BLOCK_SHARED(handed, std::uint32_t[2]);
  WINNOW_BLOCK_SHARED(messages, std::uint32_t[2]);
  WINNOW_BLOCK_SHARED_ALIGNED(16, words, std::uint32_t[4 * kThreads]);
  const int t = static_cast<int>(threadIdx.x);
  const std::uint32_t x = in[t];
  const std::uint32_t base = device::shared_address(device::dynamic_shared<1024>());
  const auto at = [&](int thread) { return base + 32 * static_cast<std::uint32_t>(thread); };
  device::st_shared(at(t), __uint_as_float(x));
  device::st_shared(at(t) + 4, static_cast<std::int32_t>(x + 1));
  device::st_shared(at(t) + 8, (std::uint64_t{x} << 32) | (x + 2));
  device::st_shared(at(t) + 16, static_cast<std::uint32_t>(x + 3));
  device::st_shared(at(t) + 20, static_cast<std::uint16_t>(x + 4));
  device::st_shared(at(t) + 22, static_cast<std::uint8_t>(x + 5));
  device::st_shared(at(t) + 23, static_cast<std::uint8_t>(x + 6));
  device::st_shared(at(t) + 24, std::uint64_t{x} * x);
  for (int i = 0; i < 4; ++i) words[4 * t + i] = x + 7 + i;
  if (t < 2) handed[t] = 0;
  __syncthreads();
  std::uint32_t* const to = out + 16 * t;
  const std::uint32_t other = at(t ^ 1);
  to[0] = __float_as_uint(device::ld_shared<float>(other));
  to[1] = device::ld_shared<std::uint32_t>(other + 4);
  const auto wide = device::ld_shared<std::uint64_t>(other + 8);
  to[2] = static_cast<std::uint32_t>(wide), to[3] = static_cast<std::uint32_t>(wide >> 32);
  const int4 four = device::ld_shared_v4(other + 16);
  to[4] = four.x, to[5] = four.y, to[6] = four.z, to[7] = four.w;
  const uint4 some =
      device::ld_shared_v4_if(t % 3 != 0, device::shared_address(words + 4 * (t ^ 1)));
  to[8] = t % 3 != 0 ? some.x : 0, to[9] = t % 3 != 0 ? some.y : 0;
  to[10] = t % 3 != 0 ? some.z : 0, to[11] = t % 3 != 0 ? some.w : 0;
  const uint4 words_again = device::ld_shared_words(other + 16);
  to[12] = words_again.x, to[13] = words_again.y;
  to[14] = words_again.z, to[15] = words_again.w;
  // The last warp hands a message to the first one, whose lanes count up for an answer.
  if (t == 96) {
    messages[0] = in[5];
    device::st_release_cta_shared(&handed[0], 1);
    while (device::ld_acquire_cta_shared(&handed[1]) != 32) {
    }
    out[16 * kThreads + 1] = messages[1];
  } else if (t < 32) {
    while (device::ld_acquire_cta_shared(&handed[0]) == 0) {
    }
    if (t == 0) out[16 * kThreads] = messages[0];
    __syncwarp();
    if (t == 0) messages[1] = in[6];
    __syncwarp();
    device::red_release_cta_shared_add<1>(&handed[1]);
  }
}

// in: [128] f32 that are small integers. out: [128][26].
__global__ void warp_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  const float x = __uint_as_float(in[t]);
  std::uint32_t* const to = out + 26 * t;
  to[0] = __float_as_uint(device::quad_max(x));
  to[1] = __float_as_uint(device::quad_sum(x));
  to[2] = __float_as_uint(device::warp_sum(x));
  to[3] = static_cast<std::uint32_t>(device::warp_prefix(static_cast<int>(x), lane));
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = x * static_cast<float>(i + 1);
  device::halve_columns<8, 16>(sums);
  for (int i = 0; i < 8; ++i) to[4 + i] = __float_as_uint(sums[i]);
  std::uint32_t w[4];
  for (int i = 0; i < 4; ++i) w[i] = in[t] + i;
  device::quad_transpose(w, lane);
  for (int i = 0; i < 4; ++i) to[12 + i] = w[i];
  to[16] = __ballot_sync(device::kFullWarp, in[t] & 1u << 23);
  to[17] = __shfl_sync(device::kFullWarp, in[t], lane / 2);
  to[18] = __shfl_up_sync(device::kFullWarp, in[t], 3);
  to[19] = __reduce_min_sync(device::kFullWarp, in[t]);
  to[20] = __reduce_max_sync(device::kFullWarp, in[t]);
  to[21] = __reduce_add_sync(device::kFullWarp, in[t]);
  to[22] = __shfl_xor_sync(device::kFullWarp, in[t], 5);
  to[23] = static_cast<std::uint32_t>(__popc(in[t]) + __clz(static_cast<int>(in[t] >> 8)));
  to[24] = __float_as_uint(device::warp_max(x));
  to[25] = __reduce_or_sync(device::kFullWarp, in[t]);
}

void launch(void (*kernel)(const std::uint32_t*, std::uint32_t*), int shared_bytes,
            const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(kernel, 1, kThreads, static_cast<std::size_t>(shared_bytes), nullptr, in, out);
}

}  // namespace

void launch_math(const std::uint32_t* in, std::uint32_t* out) { launch(math_kernel, 0, in, out); }
void launch_narrow(const std::uint32_t* in, std::uint32_t* out) {
  launch(narrow_kernel, 0, in, out);
}
void launch_memory(const std::uint32_t* in, std::uint32_t* out) {
  launch(memory_kernel, 0, in, out);
}
void launch_handover(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.check(cudaMemsetAsync(out + kThreads, 0, 2 * kHandovers * sizeof(*out), nullptr),
                 "cudaMemsetAsync");
  kRuntime.launch(handover_kernel, kHandovers + 1, kThreads, 0, nullptr, in, out);
}
void launch_reductions(const std::uint32_t* in, std::uint32_t* out) {
  launch(reductions_kernel, 0, in, out);
}
void launch_shared(const std::uint32_t* in, std::uint32_t* out) {
  launch(shared_kernel, 32 * kThreads, in, out);
}
void launch_warp(const std::uint32_t* in, std::uint32_t* out) { launch(warp_kernel, 0, in, out); }

}  // namespace winnow::conformance
