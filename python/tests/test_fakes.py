"""What torch is told before there are results: the shapes, strides and dtypes of the fake results
of every operator are those of its real ones, it refuses what the real one would refuse, torch's own
checks of operators pass, and the results are those of the function of the same name."""

import functools
import re

import problems
import pytest
import torch
import winnow.torch as wt
from kinds import gpu
from test_decode import COLUMNS, FORMATS, new_cache
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from winnow.errors import InvalidArgument

import winnow

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
    two = {
        "extra_kv": extra,
        "extra_indices": ints(3, 2),
        "scale": 0.1,
        "q_start": 5,
        "k_stride": 2,
    }
    lse, d_out = torch.zeros(3, 2, dtype=real), torch.ones(3, 2, 512, dtype=dtype)
    for rows in (kv, strided(kv), kv[:0]):
        for indices, more in ((ints(3, 1, 5), {}), (ints(3, 5), two), (None, ranges)):
            yield "sparse_mla_forward", (strided(q), rows, indices), more
            yield "sparse_mla_forward", (q, rows, indices), {**more, "flash_mla_lse": True}
            yield "sparse_mla_distribution", (q, rows, indices, lse), more
            for sink in (None, torch.randn(2, dtype=real)):
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
        yield "sparse_mla_decode", (queries, cache), {**tables, "flash_mla_lse": True}
    yield "sparse_mla_store", (q[0, :, 0], cache, torch.arange(5)), {}
    for format in FORMATS:
        # 72 * 584 is a multiple of 576, so that the cache has no padding, as copies of torch have.
        cache, rows = new_cache(format, 2, 72), torch.randn(5, COLUMNS[format]).to(BF16)
        cache = cache if format == "bf16" else cache.view(U8)
        yield "sparse_mla_store", (rows, cache, torch.arange(5)), {"format": format}
        queries, chosen = rows.view(5, 1, 1, -1), ints(5, 1, 6)
        yield "sparse_mla_decode", (queries, cache, chosen), {"format": format}


def indexer(dtype):
    q, k, scale = torch.randn(5, 8, 64).to(dtype), torch.randn(9, 64).to(dtype), torch.rand(9)
    for weights in (torch.rand(5, 8), torch.rand(5, 8).to(BF16)):
        given = q, k, weights
        options = {"k_scale": scale if dtype == F8 else None, "q_start": 8, "k_stride": 2}
        for topk, ties, scores in ((4, "smaller", False), (20, "larger", True)):
            more = {**options, "ties": ties, "return_scores": scores}
            yield "indexer_topk", (*given, topk), more
        for indices in (None, ints(5, 3), ints(5, 0)):
            d_scores = torch.randn(5, 9 if indices is None else indices.shape[1])
            yield "indexer_scores", (*given, indices), options
            if indices is None:
                yield "indexer_scores", given, {**options, "key_start": ints(5), "width": 3}
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
        for columns in (5, 0, 300):
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
            rows = torch.ones(4, 16, dtype=dtype)
            made = (None, None) if norm is None else (rows, torch.ones(4, dtype=real))
            yield "compressor_backward", (*given, *lists, *made, rows.clone()), more
            at = torch.zeros(2).int(), state, torch.arange(2).int()
            yield "compressor_step", (*given, lists[0], *at), more
    tokens, bias, state = torch.randn(9, 64), torch.zeros(2, 64), torch.zeros(3, 4, 128)
    given = tokens, tokens, bias, lists[0], at[0], state, at[2]
    pages = torch.zeros(1, 64 * 68, dtype=U8)
    yield "compressor_step_pages", (*given, pages, torch.arange(9)), {}
    wide = torch.randn(9, 512), torch.randn(9, 512), torch.zeros(2, 512), *given[3:5]
    cache, state = torch.zeros(1, 9, 1, 512, dtype=BF16), torch.zeros(3, 4, 1024)
    yield "compressor_step_store", (*wide, state, at[2], cache, torch.arange(9)), {}


def paged_xl(dtype):
    p = {name: torch.from_numpy(a) for name, a in problems.paged_xl(dtype=dtype).items()}
    caches = torch.randn_like(p["key_cache"]), torch.randn_like(p["value_cache"])
    step, rest = (p["query"], *caches, p["pos_bias_u"]), (None, p["block_tables"])
    term = torch.randn(*p["query"].shape[:2], p["r"].shape[1]).to(p["query"].dtype)
    fused = p["pos_bias_v"], p["r"]
    yield "paged_xl_append", (p["key"], p["value"], *caches, p["slot_mapping"]), {}
    yield "paged_xl_position_term", (p["query"], *fused, p["context_lens"]), {}
    yield "paged_xl_attention", (*step, term, *rest, p["context_lens"]), {}
    yield "paged_xl_attention_fused", (*step, *fused, *rest, p["context_lens"]), {}


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
    yield from paged_xl("float32")
    yield from paged_xl("float64")
    yield "expert_parallel_layout", (ints(3, 2), 4, 2, 1), {}


def operators():
    """The names of those that ranks do not call together: these need layers, and have tests of
    their own, and their errors are those of all ranks, at run time."""
    for name in torch._C._dispatch_get_all_op_names():
        operator = name.removeprefix("winnow::")
        if operator == name:
            continue
        packet = getattr(torch.ops.winnow, operator).default
        if torch.Tag.cudagraph_unsafe not in packet.tags:
            yield operator
        else:
            assert operator.startswith("expert_parallel_")


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
    assert seen == set(operators())


def shown(value):
    """What two calls of one kind share of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dim()
    return value if isinstance(value, (bool, str)) else type(value)


def dtype_of_queries(name, arguments, options):
    return arguments[name == "indexer_loss_backward"].dtype


def one_of_each_kind(dtype):
    """Of the calls that differ in which tensors are given, in a flag or in a format one each; with
    queries of that dtype where an operator takes it."""
    torch.manual_seed(0)
    found = {}
    for call in calls():
        name, arguments, options = call
        if name.startswith("compressor_"):
            continue  # test_compressor.py has them
        kind = (name, *options, *map(shown, (*arguments, *options.values())))
        known = kind in found and dtype_of_queries(*found[kind])
        if not known or known != dtype == dtype_of_queries(*call):
            found[kind] = call
    return [pytest.param(*call, id=f"{call[0]}-{i}") for i, call in enumerate(found.values())]


def function_of(name):
    """What numpy's arrays are passed to, too; None for an operator that is a part of another."""
    family = re.match("sparse_mla|indexer|paged_xl|expert_parallel", name)[0]
    return getattr(getattr(winnow, family), name.removeprefix(f"{family}_"), None)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [call for call in one_of_each_kind(torch.float32) if function_of(call.values[0])],
)
def test_an_operator_gives_what_its_function_gives(name, arguments, options):
    options = {n: v for n, v in options.items() if not n.endswith("_dtype")}  # of operators alone
    if name.startswith("paged_xl_attention"):
        options["return_lse"] = True
    found = []
    for call in (getattr(wt, name), function_of(name)):
        given = tree_map_only(torch.Tensor, torch.clone, (arguments, options))
        results = call(*given[0], **given[1])
        tensors = [t for t in tree_leaves((results, given)) if isinstance(t, torch.Tensor)]
        found.append([(t.dtype, bits(t)) for t in tensors])
    for (dtype, got), (want_dtype, want) in zip(*found, strict=True):
        assert dtype == want_dtype and torch.equal(got, want)


# Those whose tensors may want a gradient.
DIFFERENTIABLE = {"sparse_mla_forward", "indexer_scores", "indexer_loss_rows"}


def opcheck(name, arguments, options, device="cpu"):
    given = tree_map_only(torch.Tensor, lambda t: t.detach().to(device), (arguments, options))
    tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    checks = {}
    if any(t.dtype == F8 for t in tensors):  # of which torch has no sums
        checks = {"test_utils": ("test_autograd_registration", "test_faketensor")}
    operator = getattr(torch.ops.winnow, name).default
    torch.library.opcheck(operator, *given, **checks)
    if name in DIFFERENTIABLE:
        leaves = [t.requires_grad_() for t in tensors if t.is_floating_point() and t.dtype != F8]
        assert leaves
        torch.library.opcheck(operator, *given, **checks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "arguments", "options"), one_of_each_kind(torch.float32))
def test_opcheck(name, arguments, options):
    opcheck(name, arguments, options)


@pytest.mark.gpu
@gpu[1]
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "arguments", "options"), one_of_each_kind(BF16))
def test_opcheck_on_a_gpu(name, arguments, options):
    opcheck(name, arguments, options, "cuda")


def own(tensor, device="cpu", apart=1):
    """The same values in memory that is no other tensor's: fake views take long to make."""
    strides = [apart * stride for stride in tensor.stride()]
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def wrong(arguments, options):
    """The call with one argument changed, to what one of them at least refuses."""
    given = {**dict(enumerate(arguments)), **options}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            integers = value.new_zeros(value.shape, dtype=torch.int16)
            others = integers, own(value[None]), own(value, apart=2)
        elif isinstance(value, str):
            others = ("nothing",)
        else:
            others = () if value is None or isinstance(value, bool) else (-5,)
        for other in others:
            changed = {**given, name: other}
            rest = [changed.pop(place) for place in range(len(arguments))]
            yield rest, changed


def refusal(operator, arguments, options):
    """Its text, or whether anything else was wrong."""
    try:
        operator(*arguments, **options)
    except InvalidArgument as error:
        return str(error)
    except (IndexError, RuntimeError, TypeError, ValueError):  # torch's own
        return True
    return False


def fake(mode, tensor):
    if mode.shape_env is None:
        return mode.from_tensor(tensor)
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.dim())
    return mode.from_tensor(tensor, symbolic_context=sizes)


@pytest.mark.parametrize("name", sorted(operators()))
def test_what_is_wrong_is_refused_before_run_time(name):
    torch.manual_seed(0)
    operator = getattr(torch.ops.winnow, name)
    found = next(rest for found, *rest in calls() if found == name)
    arguments, options = tree_map_only(torch.Tensor, own, found)
    plain, texts = FakeTensorMode(), []  # it keeps what it has made of a tensor
    for call in ((list(arguments), options), *wrong(arguments, options)):
        texts.append(refusal(operator, *call))
        meta = tree_map_only(torch.Tensor, functools.partial(own, device="meta"), call)
        assert refusal(operator, *meta) == texts[-1]
        for mode in (plain, FakeTensorMode(shape_env=ShapeEnv())):
            with mode:
                given = tree_map_only(torch.Tensor, functools.partial(fake, mode), call)
                assert refusal(operator, *given) == texts[-1]
                assert not mode.shape_env or not mode.shape_env.guards
    assert texts[0] is False and any(isinstance(text, str) for text in texts)


def test_tensors_on_several_devices_are_refused():
    q, kv = (torch.zeros(n, h, 576, dtype=torch.bfloat16) for n, h in ((3, 2), (7, 1)))
    indices = ints(3, 1, 5)
    with FakeTensorMode() as mode:
        given = [torch.empty(t.shape, dtype=t.dtype) for t in (q, kv)]
        on_gpu = torch.empty(3, 1, 5, dtype=torch.int32, device="cuda")
        with pytest.raises(InvalidArgument, match="forward: indices: want .*cpu.*, got .*cuda:0"):
            wt.sparse_mla_forward(*given, on_gpu)
        # Whether a backend takes them is for the machine that runs them.
        moved = [mode.from_tensor(t).to("cuda") for t in (q, kv, indices)]
        assert wt.sparse_mla_attention(*moved).device.type == "cuda"


def test_sizes_that_only_run_time_tells_are_left_to_it():
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        rows = shape_env.create_unbacked_symint()
        q = torch.empty(rows, 2, 128)
        kv, indices = torch.empty(7, 1, 128), torch.empty(rows, 1, 5, dtype=torch.int32)
        assert wt.sparse_mla_attention(q, kv, indices).shape[0] == rows


def test_a_compiled_function_is_refused_while_it_is_compiled():
    def attend(*tensors):
        return wt.sparse_mla_attention(*tensors)

    def problem(s_q, s_kv, topk, d=576):
        return torch.randn(s_q, 2, d), torch.randn(s_kv, 1, d), ints(s_q, topk)

    for dynamic in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic)
        for d in (100, 128):
            with pytest.raises(Exception, match=f"q: want d_qk = 576 or 512, got d_qk = {d}"):
                compiled(*problem(3, 7, 5, d))
        assert counter.frame_count == 0
        for sizes in ((3, 7, 5), (4, 9, 6), (5, 11, 8)):
            given = problem(*sizes)
            torch.testing.assert_close(compiled(*given), attend(*given))
        assert counter.frame_count == 1 or not dynamic
    torch._dynamo.reset()
