// Stands for CUDA's header in builds for the simulator.
#pragma once

#include "winnow/simulator/include/cuda_runtime.h"
