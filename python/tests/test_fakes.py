"""What torch is told of results before there are any: the shapes, strides and dtypes of the fake
results of every operator are those of its real ones."""

import torch
import winnow.torch  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

F8, BF16, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8


def ints(*shape, below=3):
    return torch.randint(below, shape, dtype=torch.int32)


def strided(tensor):
    """The same values in rows that are apart."""
    apart = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 8)
    return apart[..., : tensor.shape[-1]].copy_(tensor)


def sparse_mla(dtype):
    real = torch.promote_types(dtype, torch.float32)
    q, kv, extra = (torch.randn(*s).to(dtype) for s in ((3, 2, 576), (7, 1, 576), (4, 1, 576)))
    ranges = {"key_start": ints(3), "key_end": ints(3) + 4}
    two = {"extra_kv": extra, "extra_indices": ints(3, 2)}
    lse, d_out = torch.zeros(3, 2, dtype=real), torch.ones(3, 2, 512, dtype=dtype)
    for rows in (kv, strided(kv), kv[:0]):
        for indices, more in ((ints(3, 1, 5), {}), (ints(3, 5), two), (None, ranges)):
            yield "sparse_mla_forward", (strided(q), rows, indices), more
            yield "sparse_mla_distribution", (q, rows, indices, lse), more
            for sink in (None, torch.zeros(2, dtype=real)):
                for dkv_dtype in (None, dtype):
                    options = {**more, "attn_sink": sink, "dkv_dtype": dkv_dtype}
                    given = (strided(q), rows, indices, d_out, lse, d_out)
                    yield "sparse_mla_backward", given, options


def decode():
    cache, q = torch.zeros(3, 4, 1, 656, dtype=U8), torch.randn(2, 5, 2, 576).to(BF16)
    tables = {"block_tables": ints(2, 2), "context_lens": ints(2)}
    for queries in (q, q.transpose(1, 2), q[:, :0]):
        steps = queries.shape[1]
        yield "sparse_mla_decode", (queries, cache, ints(2, steps, 6)), {}
        yield "sparse_mla_decode", (queries, cache), tables
        yield "sparse_mla_decode", (queries, cache), {**tables, "causal": False}
    yield "sparse_mla_store", (q[0, :, 0], cache, torch.arange(5)), {}


def indexer(dtype):
    q, k, scale = torch.randn(5, 8, 64).to(dtype), torch.randn(9, 64).to(dtype), torch.rand(9)
    for weights in (torch.rand(5, 8), torch.rand(5, 8).to(BF16)):
        given, options = (q, k, weights), {"k_scale": scale if dtype == F8 else None}
        for topk, scores in ((4, False), (20, True)):
            yield "indexer_topk", (*given, topk), {**options, "return_scores": scores}
        for indices in (None, ints(5, 3), ints(5, 0)):
            d_scores = torch.zeros(5, 9 if indices is None else indices.shape[1])
            yield "indexer_scores", (*given, indices), options
            for dk_dtype in (None, torch.float32 if dtype == F8 else dtype):
                more = {**options, "dk_dtype": dk_dtype}
                yield "indexer_backward", (*given, indices, d_scores), more


def indexer_loss(dtype):
    q, k = torch.randn(5, 8, 64).to(dtype), torch.randn(9, 64).to(dtype)
    teacher = torch.randn(5, 2, 576).to(dtype), torch.randn(9, 1, 576).to(dtype), torch.zeros(5, 2)
    ranges = ints(5), ints(5) + 4
    for weights in (torch.rand(5, 8), torch.rand(5, 8).to(BF16)):
        for indices in (None, ints(5, 3)):
            target = torch.rand(5, 9 if indices is None else 3)
            for taught in ((target, indices, None, None, None), (None, indices, *teacher)):
                problem = (q, k, weights, *taught, None, None, *ranges, 0)
                yield "indexer_loss_rows", problem, {}
                yield "indexer_loss_backward", (torch.ones(5), *problem), {}


def paged():
    pages = torch.zeros(3, 64 * 68, dtype=U8)
    step = torch.randn(2, 3, 8, 64).to(F8), pages, torch.rand(2, 3, 8), ints(2, 2)
    for lengths in (ints(2), ints(2, 3)):
        for scores in (False, True):
            yield "indexer_topk_paged", (*step, lengths, 5), {"return_scores": scores}
        for columns in (0, 5, 300):
            yield "indexer_scores_paged", (*step, lengths, columns), {}
    for rows in (torch.randn(5, 64), torch.randn(5, 2, 128).half(), strided(torch.randn(0, 64))):
        yield "indexer_quantize", (rows,), {}
    yield "indexer_quantize_pages", (torch.randn(5, 64), pages, torch.arange(5)), {}


def compressor(dtype):
    real = torch.promote_types(dtype, torch.float32)
    for overlap in (False, True):
        tokens = torch.randn(9, 16 * (1 + overlap)).to(dtype)
        bias, options = torch.zeros(2, tokens.shape[1], dtype=real), {"overlap": overlap}
        lists = torch.tensor([0, 5, 9]).int(), torch.tensor([0, 2, 4]).int()
        state = torch.zeros(3, 4, 2 * tokens.shape[1], dtype=real)
        for norm in (None, torch.ones(16, dtype=real)):
            more = {**options, "norm_weight": norm}
            given = (strided(tokens), tokens, bias)
            yield "compressor_forward", (*given, *lists), more
            yield "compressor_forward", (*given, *lists), {**more, "num_rows": 4}
            yield "compressor_backward", (*given, *lists, torch.ones(4, 16, dtype=dtype)), more
            at = torch.zeros(2).int(), state, torch.arange(2).int()
            yield "compressor_step", (*given, lists[0], *at), more
    tokens, bias, state = torch.randn(9, 64), torch.zeros(2, 64), torch.zeros(3, 4, 128)
    given = tokens, tokens, bias, lists[0], at[0], state, at[2]
    pages = torch.zeros(1, 64 * 68, dtype=U8)
    yield "compressor_step_pages", (*given, pages, torch.arange(9)), {}
    wide = torch.randn(9, 512), torch.randn(9, 512), torch.zeros(2, 512), *given[3:5]
    cache, state = torch.zeros(1, 9, 1, 512, dtype=BF16), torch.zeros(3, 4, 1024)
    yield "compressor_step_store", (*wide, state, at[2], cache, torch.arange(9)), {}


def calls():
    for dtype in (torch.float32, BF16, torch.float16, torch.float64):
        yield from sparse_mla(dtype)
        yield from compressor(dtype)
    for dtype in (torch.float32, BF16, torch.float16, F8):
        yield from indexer(dtype)
        if dtype != F8:
            yield from indexer_loss(dtype)
    yield from decode()
    yield from paged()
    yield "expert_parallel_layout", (ints(3, 2), 4, 2, 1), {}


# Those of tests of their own, which have a problem or a layer for them: opcheck() there.
ELSEWHERE = ("paged_xl_", "expert_parallel_")


def outlines(results):
    listed = [results] if isinstance(results, torch.Tensor) else results or ()
    # torch leaves the strides of a tensor without elements to those who make it.
    return [(t.shape, t.numel() and t.stride(), t.dtype, t.device) for t in listed]


def test_fake_results_are_those_of_the_kernels():
    torch.manual_seed(0)
    seen = set()
    for name, arguments, options in calls():
        operator = getattr(torch.ops.winnow, name)
        seen.add(name)
        with FakeTensorMode() as mode:
            given = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options))
            fake = outlines(operator(*given[0], **given[1]))
        assert fake == outlines(operator(*arguments, **options)), (name, options)
    every = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "winnow::" in n}
    missing = {n for n in every - seen if not n.startswith(ELSEWHERE)}
    assert not missing
