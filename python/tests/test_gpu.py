"""What only a GPU can show: streams, graphs, memory, gradients, compilation. Skipped without one.

That the results are right there is among the tests of each operation.
"""

import re

import numpy as np
import problems
import pytest
import torch
import winnow.torch as ops
from compiled import assert_compiles, assert_replays
from kinds import gpu

import winnow
from winnow import indexer, paged_xl, sparse_mla

pytestmark = gpu

SLEEP = 400_000_000  # GPU cycles: some tenths of a second


def _sparse(s_q=48, h_q=64, s_kv=300, topk=128, seed=0):
    q, kv, indices, options = problems.sparse_mla(
        seed, s_q=s_q, h_q=h_q, s_kv=s_kv, topk=topk, sink=True
    )
    q, kv = (torch.from_numpy(a).cuda().bfloat16() for a in (q, kv))
    return q, kv, torch.from_numpy(indices).cuda(), torch.from_numpy(options["attn_sink"]).cuda()


def _paged():
    p = problems.paged_xl(context_lens=(5, 0, 190), dtype="bfloat16")
    p = {name: torch.from_numpy(a).cuda() for name, a in p.items()}
    return {name: a.bfloat16() if a.is_floating_point() else a for name, a in p.items()}


def _serving():
    """The arguments of store, topk_paged and decode, over a cache of 8 pages."""
    torch.manual_seed(0)
    cache = torch.zeros(8, 64, 1, 656, dtype=torch.uint8, device="cuda")
    keys = torch.zeros(8, 64 * (128 + 4), dtype=torch.uint8, device="cuda")
    rows, slots = torch.randn(512, 576, device="cuda").bfloat16(), torch.randperm(512).cuda()
    sparse_mla.store(rows, cache, slots)
    indexer.quantize(torch.randn(512, 128, device="cuda"), pages=keys, slots=slots)
    heads, scale = indexer.quantize(torch.randn(4, 8, 128, device="cuda"))
    table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([70, 190], dtype=torch.int32, device="cuda")
    choice = [heads.view(2, 2, 8, 128), keys, scale.view(2, 2, 8), table, lengths, 64]
    chosen, count = indexer.topk_paged(*choice)
    q = torch.randn(2, 2, 16, 576, device="cuda").bfloat16()
    return [rows, cache, slots], choice, [q, cache, chosen], {"topk_length": count}


def _calls():
    """Every plain function on CUDA tensors, and how many tensors torch makes for it."""
    q, kv, indices, sink = _sparse()
    out, _, lse = sparse_mla.forward(q, kv, indices, attn_sink=sink)
    gradient = {"attn_sink": sink, "deterministic": True}
    p = _paged()
    append = [p[n] for n in ("key", "value", "key_cache", "value_cache", "slot_mapping")]
    paged_xl.append(*append)
    position = [p[n] for n in ("query", "pos_bias_v", "r", "context_lens")]
    step = [p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u")]
    plain = [*step, paged_xl.position_term(*position), None, p["block_tables"], p["context_lens"]]
    fused = [*step, p["pos_bias_v"], p["r"], None, p["block_tables"], p["context_lens"]]
    keys = [torch.randn(shape, device="cuda").bfloat16() for shape in ((48, 64, 128), (300, 128))]
    keys.append(torch.randn(48, 64, device="cuda"))
    rows = torch.randint(-1, 300, (48, 100), dtype=torch.int32, device="cuda")
    d_scores = torch.randn(48, 100, device="cuda")
    exact = {"deterministic": True}
    stored, choice, decoded, lengths = _serving()
    return {
        "indexer_scores": (lambda **o: indexer.scores(*keys, rows, **o), 1),
        "indexer_backward": (  # dq, dk, d_weights and the workspace
            lambda **o: indexer.backward(*keys, rows, d_scores, **exact, **o),
            4,
        ),
        "forward": (lambda **o: sparse_mla.forward(q, kv, indices, attn_sink=sink, **o), 3),
        "distribution": (lambda **o: sparse_mla.distribution(q, kv, indices, lse, **o), 1),
        "backward": (  # dq, dkv, d_sink and the workspace
            lambda **o: sparse_mla.backward(q, kv, indices, out, lse, out, **gradient, **o),
            4,
        ),
        "store": (lambda **o: sparse_mla.store(*stored, **o), 0),
        # the results and the workspace
        "topk_paged": (lambda **o: indexer.topk_paged(*choice, **o), 3),
        "scores_paged": (lambda **o: indexer.scores_paged(*choice, **o), 1),
        # one tile of entries: no workspace
        "decode": (lambda **o: sparse_mla.decode(*decoded, **lengths, **o), 2),
        "append": (lambda **o: paged_xl.append(*append, **o), 0),
        "position_term": (lambda **o: paged_xl.position_term(*position, **o), 1),
        # out and the workspace
        "attention": (lambda **o: paged_xl.attention(*plain, **o), 2),
        "attention_fused": (lambda **o: paged_xl.attention_fused(*fused, **o), 2),
    }


NAMES = ["forward", "distribution", "backward", "append", "position_term", "attention"]
NAMES += ["attention_fused", "indexer_scores", "indexer_backward"]
NAMES += ["store", "topk_paged", "scores_paged", "decode"]


def _tensors(results):
    return [] if results is None else list(results) if isinstance(results, tuple) else [results]


def _assert_equal(got, want):
    for g, w in zip(_tensors(got), _tensors(want), strict=True):
        assert torch.equal(g, w)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_call_joins_its_stream_and_does_not_wait(name, explicit):
    call, _ = _calls()[name]
    want = call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    begun = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            begun.record()
            if not explicit:
                got = call()
        if explicit:
            got = call(stream=side)
        done = side.record_event()
        assert not begun.query()  # the call came back while the stream sleeps
        assert torch.cuda.current_stream().query()  # and left nothing on another one
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    _assert_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_on_another_stream_needs_nothing_of_the_current_one(name):
    call, _ = _calls()[name]
    want = call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP)
    got = call(stream=side)
    side.synchronize()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    _assert_equal(got, want)


@pytest.mark.parametrize("handle", [lambda s: s.cuda_stream, lambda s: _CudaStream(s)])
@pytest.mark.parametrize("stream", [torch.cuda.Stream, torch.cuda.default_stream])
def test_streams_in_every_form(stream, handle):
    call, _ = _calls()["position_term"]
    want = call()
    torch.cuda.synchronize()
    stream = stream()
    with torch.cuda.stream(torch.cuda.Stream()):  # neither of them
        torch.cuda._sleep(SLEEP)
        got = call(stream=handle(stream))
        stream.synchronize()
        assert not torch.cuda.current_stream().query()
    _assert_equal(got, want)


class _CudaStream:
    def __init__(self, stream):
        self._handle = stream.cuda_stream

    def __cuda_stream__(self):
        return (0, self._handle)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("explicit", [False, True])
def test_nothing_is_copied(name, explicit):
    """torch makes the results and the workspace, and no memory of the device is taken elsewhere."""
    call, made = _calls()[name]
    options = {"stream": torch.cuda.current_stream()} if explicit else {}
    call(**options)
    torch.cuda.synchronize()
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    free, _ = torch.cuda.mem_get_info()
    results = call(**options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == count + made
    assert torch.cuda.mem_get_info()[0] == free
    del results


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_with_new_numbers(name):
    call, _ = _calls()[name]
    inputs = [c.cell_contents for c in call.__closure__]
    inputs = [t for i in inputs for t in (i if isinstance(i, list) else [i])]
    inputs = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
    first = next(t for t in inputs if t.element_size() > 1)  # torch does not multiply f8
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for factor in (0.5, 3.0):
        first.mul_(factor)
        graph.replay()
        _assert_equal(captured, call())


@pytest.mark.parametrize("name", ["backward", "attention", "attention_fused", "topk"])
def test_a_workspace_of_the_caller_is_used(name):
    """The refusal of one that is too small says how large it must be."""
    if name == "topk":
        q, weights = torch.randn(4, 64, 128, device="cuda"), torch.randn(4, 64, device="cuda")
        k = torch.randn(5000, 128, device="cuda").bfloat16()

        def call(**o):
            return indexer.topk(q.bfloat16(), k, weights, 64, **o)
    else:
        call, _ = _calls()[name]
    want = call()
    with pytest.raises(ValueError, match="workspace: want [0-9]+ bytes or more, got 1") as refused:
        call(workspace=torch.empty(1, dtype=torch.uint8, device="cuda"))
    size = int(re.search("want ([0-9]+) bytes", str(refused.value)).group(1))
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    _assert_equal(call(workspace=workspace), want)
    assert (workspace != 255).any()


def test_append_in_a_graph_and_on_a_stream():
    p = _paged()
    want = [p[n].cpu() for n in ("key_cache", "value_cache")]
    paged_xl.append(p["key"].cpu(), p["value"].cpu(), *want, p["slot_mapping"].cpu())
    arguments = [p[n] for n in ("key", "value", "key_cache", "value_cache", "slot_mapping")]
    empty = [t.clone() for t in arguments[2:4]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_xl.append(*arguments)
    side = torch.cuda.Stream()

    def on_the_side():
        side.wait_stream(torch.cuda.current_stream())
        paged_xl.append(*arguments, stream=side)
        side.synchronize()

    for run in (graph.replay, on_the_side):
        for cache, nothing in zip(arguments[2:4], empty, strict=True):
            cache.copy_(nothing)
        run()
        for cache, expected in zip(arguments[2:4], want, strict=True):
            torch.testing.assert_close(cache.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_training_step_in_a_graph():
    q, kv, indices, sink = _sparse()
    leaves = [t.requires_grad_() for t in (q, kv, sink)]

    def step():
        out = ops.sparse_mla_attention(
            leaves[0], leaves[1], indices, attn_sink=leaves[2], deterministic=True
        )
        return torch.autograd.grad(out.float().square().sum(), leaves)

    assert_replays(step, lambda: q.mul_(1.5))


@pytest.mark.filterwarnings("ignore")
def test_compiled_in_one_graph():
    q, kv, indices, sink = _sparse()
    p = _paged()
    append = [p[n] for n in ("key", "value", "key_cache", "value_cache", "slot_mapping")]
    step = [p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u")]
    tables = [p["block_tables"], p["context_lens"]]

    def model(q, kv, sink):
        out, lse = ops.sparse_mla_attention(
            2 * q, kv, indices, attn_sink=sink, deterministic=True, return_lse=True
        )
        teacher = ops.sparse_mla_distribution(2 * q, kv, indices, lse)
        ops.paged_xl_append(*append)
        term = ops.paged_xl_position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
        decoded = ops.paged_xl_attention(*step, term, None, *tables)
        fused = ops.paged_xl_attention_fused(*step, p["pos_bias_v"], p["r"], None, *tables)
        return out.float().square().sum(), teacher.sum() + decoded.sum() + fused.sum()

    assert_compiles(model, (q, kv, sink), rtol=1e-2, atol=1e-2)


def test_supports_knows_the_kernels():
    def reason(op, **shape):
        return winnow.supports(op, device="cuda", **shape).reason

    for op in ("forward", "distribution", "backward"):
        answer = winnow.supports(f"sparse_mla.{op}", device="cuda:0", dtype="bfloat16", h_q=128)
        assert answer.backend == "sm90", answer
        wrong = "q: want dtype bf16 or f16 on a GPU (the CPU takes f32), got f32"
        assert wrong in reason(f"sparse_mla.{op}")
        huge = {"dtype": torch.bfloat16, "s_q": 2**24, "h_q": 128}
        assert "want topk and s_q * h_q up to 2^30" in reason(f"sparse_mla.{op}", **huge)
        two = {"dtype": "bfloat16", "s_extra": 100}
        answer = winnow.supports(f"sparse_mla.{op}", device="cuda", **two)
        assert answer.backend == "sm90", answer
    bf16 = {"device": "cuda", "dtype": "bfloat16"}
    for n in (7, 2000):  # more than 1,024 rows take a workspace
        assert winnow.supports("sparse_mla.store", n=n, **bf16).backend == "cuda"
    assert winnow.supports("sparse_mla.decode", **bf16).backend == "sm90"
    f8 = {"device": "cuda", "dtype": "float8_e4m3fn"}
    for op in ("topk_paged", "scores_paged"):
        assert winnow.supports(f"indexer.{op}", **f8).backend == "sm90"
    for op in ("append", "attention", "attention_fused", "position_term"):
        assert winnow.supports(f"paged_xl.{op}", device="cuda").backend == "cuda", op
    for op in ("attention", "attention_fused"):
        assert "want num_seqs and num_heads" in reason(f"paged_xl.{op}", num_seqs=70000)
    assert "want num_seqs up to 2^20" in reason("paged_xl.position_term", num_seqs=2**20 + 1)
    assert "want num_kv_heads up to 65535" in reason("paged_xl.append", num_kv_heads=65536)


def test_checking_waits_and_cannot_be_captured():
    call, _ = _calls()["attention"]
    want = call()
    _assert_equal(call(check=True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
        with pytest.raises(winnow.Error, match="checking mode waits for the stream"):
            call(check=True)
    graph.replay()
    _assert_equal(captured, want)


def test_checking_finds_bad_slots_of_store():
    (rows, cache, slots), *_ = _serving()
    sparse_mla.store(rows, cache, slots, check=True)
    before = cache.clone()
    for bad, text in ((512, "got slot 512 for row 100"), (int(slots[3]), "each slot at most once")):
        wrong = slots.clone()
        wrong[100] = bad
        with pytest.raises(winnow.Error, match=text):
            sparse_mla.store(rows, cache, wrong, check=True)
        assert torch.equal(cache, before)


def test_cupy_streams():
    cupy = pytest.importorskip("cupy")
    p = {name: cupy.asarray(a) for name, a in problems.paged_xl(dtype="float16").items()}
    position = [p[n] for n in ("query", "pos_bias_v", "r", "context_lens")]
    want = paged_xl.position_term(*position)
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        got = paged_xl.position_term(*position, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(got.get(), want.get())
        out = cupy.full_like(want, cupy.nan)
        assert paged_xl.position_term(*position, out=out, stream=stream.ptr) is out
        stream.synchronize()
        assert not cupy.isnan(out[0, :, :5]).any()
