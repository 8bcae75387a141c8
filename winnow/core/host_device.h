// Marks functions that kernels call, too. Internal: public headers leave no such macro behind.
#pragma once

#ifdef __CUDACC__
#define WINNOW_HOST_DEVICE __host__ __device__
#else
#define WINNOW_HOST_DEVICE
#endif
