// Every public header of Winnow.
#pragma once

#include "winnow/core/backend.h"
#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/core/error.h"
#include "winnow/core/parallel.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"
#include "winnow/core/version.h"
#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/position_term/position_term.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/forward/forward.h"
