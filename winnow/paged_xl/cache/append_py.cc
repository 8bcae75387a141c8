// Python binding of paged_xl::append.
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cache/append_contract.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::kAppend> kAppend(
    "def append(key: T, value: T, key_cache: T, value_cache: T, slot_mapping: T, *, "
    "check: bool = False, stream: Stream = None, backend: str | None = None) -> None");

nb::object append(const Arguments<kAppend>& given) {
  Call call = given.call();
  paged_xl::AppendArgs args = given.read(call);
  given.run(call, args, paged_xl::append);
  return nb::none();
}

constexpr const char* kDoc = R"(Writes new keys and values into a paged cache, in place.

Token t goes to slot_mapping[t] = block * block_size + offset of both caches; a negative slot is
skipped. The caches must not overlap other tensors or each other.

Args:
    check: refuse a slot beyond the cache or one written twice also on a GPU, which otherwise skips
        the one and writes either token of the other; as in attention().
    stream, backend: as in winnow.sparse_mla.forward().

Raises:
    ValueError: an argument is not as described; on the CPU and with check also a slot beyond the
        cache or one written twice. Nothing was written.
    winnow.Error: no backend can run it here.)";

const Operation<kAppend, append, kDoc, paged_xl::append> kRegistered;

}  // namespace
}  // namespace winnow::python
