// Values of the caller that another thread may rewrite during a call. Internal.
#pragma once

namespace winnow {

// Reads an index, a count or a length exactly once, so that what is checked is what is used: a
// compiler may read a plain variable again for every use.
template <class T>
T read_once(const T* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}

}  // namespace winnow
