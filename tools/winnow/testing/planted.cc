// A library that nobody asked for, for the test that nothing is loaded from the current directory.
#include <unistd.h>

namespace {
const bool g_loaded = (_exit(99), true);
}
