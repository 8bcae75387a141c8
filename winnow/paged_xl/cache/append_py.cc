// Python binding of paged_xl::append.
#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cache/append_fields.h"
#include "winnow/python/operation.h"

namespace winnow::python {
namespace {

constexpr Declaration<paged_xl::AppendArgs> kAppend(
    "paged_xl::append",
    "def append(key: T, value: T, key_cache: T, value_cache: T, slot_mapping: T, *, "
    "check: bool = False, stream: Stream = None, backend: str | None = None) -> None",
    "key: T[num_tokens, num_kv_heads=16, head_size=128], "
    "value: T[num_tokens, num_kv_heads, head_size], slot_mapping: i64[num_tokens], "
    "key_cache: T[num_blocks, num_kv_heads, head_size/x, block_size=16, x], "
    "value_cache: T[num_blocks, num_kv_heads, head_size, block_size]");

nb::object append(const Arguments<kAppend>& given) {
  Call call = given.call();
  const paged_xl::AppendArgs args = given.read(call);
  call.run([&](const RunOptions& options) { paged_xl::append(args, options); });
  return nb::none();
}

constexpr const char* kDoc = R"(Writes new keys and values into a paged cache, in place.

Token t goes to slot_mapping[t] = block * block_size + offset of both caches; a negative slot is
skipped. The caches must not overlap other tensors or each other.

Args:
    key, value: [num_tokens, num_kv_heads, head_size], float32, float16, bfloat16 or, on the CPU,
        float64.
    key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], as key, with x = 16 bytes
        / size of an element.
    value_cache: [num_blocks, num_kv_heads, head_size, block_size], as key.
    slot_mapping: [num_tokens], int64 or int32.
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
