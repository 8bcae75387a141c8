// Python binding of sparse_mla::store.

#include "winnow/python/operation.h"
#include "winnow/sparse_mla/cache_py.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/sparse_mla/store/store_contract.h"

namespace winnow::python {
namespace {

constexpr Declaration<sparse_mla::kStore> kStore(
    "def store(rows: T, cache: T, slots: T, *, format: str = 'fp8_656', "
    "check: bool = False, workspace: T | None = None, stream: Stream = None, "
    "backend: str | None = None) -> None");

nb::object store(const Arguments<kStore>& given) {
  Call call = given.call();
  sparse_mla::StoreArgs args = given.read(call);
  given.run(call, args, sparse_mla::store, sparse_mla::store_workspace_bytes);
  return nb::none();
}

constexpr const char* kDoc = R"(Writes new rows into a paged cache, quantised as its format says.

    scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))   amax: the largest magnitude of a group
    f8 = round(row / scale)                          to nearest even, saturating at 448

A group is 128 values in "fp8_656" and 64 in "fp8_584"; the 64 columns of RoPE are copied, as is
everything in "bf16". If a group contains a NaN or an infinity, the whole group and its scale become
NaN. A row is written completely or not at all.

Args:
    check: makes a GPU, too, refuse slots outside of the cache and slots of several rows, as in
        winnow.paged_xl.append(). Otherwise it skips the former and stores one row of the latter.
    workspace: scratch memory for a GPU, as in decode(). The CPU does not use it.
    stream, backend: as in winnow.sparse_mla.forward().

Raises:
    ValueError: an argument is not as described; on the CPU and with check also a slot outside
        of the cache or named twice. Nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kStore, store, kDoc, sparse_mla::store, cache_for_supports> kRegistered;

}  // namespace
}  // namespace winnow::python
