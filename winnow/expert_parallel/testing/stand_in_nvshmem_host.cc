// In the place of libnvshmem_host.so.3, for the test of where that is looked for.
extern "C" int stand_in_nvshmem_version() { return 9; }
