// Values of the caller's that another thread may rewrite during a call. Internal.
#pragma once

namespace winnow {

// Reads an index, a count or a length once: what is checked is what is used, whatever another
// thread writes meanwhile, and the compiler does not read it again.
template <class T>
T read_once(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_RELAXED);
}

}  // namespace winnow
