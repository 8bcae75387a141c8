// Functions that kernels call too.
#pragma once

#ifdef __CUDACC__
#define WINNOW_HD __host__ __device__
#else
#define WINNOW_HD
#endif
