// Stands for CUDA's header in builds for the simulator: conversions to f8_e4m3 that saturate.
#pragma once

#include "winnow/simulator/instructions/number_formats.h"

using __nv_fp8_storage_t = unsigned char;
enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t,
                                                __nv_fp8_interpretation_t) {
  return winnow::simulator::cvt_rn_satfinite_e4m3(x);
}
