"""Ctrl-C during a call on the CPU ends it at once, and the library works on."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import winnow.torch as ops

import winnow
from winnow import compressor, expert_parallel, indexer, paged_xl, sparse_mla

_README = Path(__file__).resolve().parents[2] / "README.md"
# Far more than any of these calls needs to hear of the signal, on a machine that does other things,
# too. Most calls take minutes. Those that write much memory in half a second must not have ended,
# and the memory that they have not reached is none.
_PATIENCE = 10.0  # seconds


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    """More would end the shorter calls before they hear anything."""
    before = winnow.num_threads()
    winnow.set_num_threads(2)
    yield
    winnow.set_num_threads(before)


def _many(tensor, *shape):
    """Large shapes in little memory."""
    return tensor.expand(shape)


def _rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _sparse_mla(s_q, topk, h_q=128):
    q = _many(_rows(1, h_q, 576), s_q, h_q, 576)
    indices = torch.arange(topk, dtype=torch.int32) % 1000
    return {"q": q, "kv": _rows(1000, 1, 576), "indices": _many(indices, s_q, 1, topk)}


def _indexer(s_q, s_k, h=64):
    q, weights = _many(_rows(1, h, 128), s_q, h, 128), _many(_rows(1, h), s_q, h)
    return q, _many(_rows(1, 128), s_k, 128), weights


def _forward(**tensors):
    out = torch.zeros(*tensors["q"].shape[:2], 512)
    return (lambda: sparse_mla.forward(**tensors, out=out)), [out]


def _forward_long_query():
    return _forward(**_sparse_mla(2, 8 << 20))


def _forward_many_queries():
    return _forward(**_sparse_mla(512, 1 << 16))


def _distribution():
    out = torch.zeros(4, 4 << 20)
    lse = torch.zeros(4, 128)
    return (lambda: sparse_mla.distribution(**_sparse_mla(4, 4 << 20), lse=lse, out=out)), [out]


def _backward_tensors():
    tensors = _sparse_mla(256, 20_000)
    d_out = _many(_rows(1, 128, 512), 256, 128, 512)
    return {**tensors, "out": d_out, "lse": torch.full((256, 128), 40.0), "d_out": d_out}


def _backward():
    outputs = {"dq": torch.zeros(256, 128, 576), "dkv": torch.zeros(1000, 1, 576)}
    tensors = _backward_tensors()
    return (lambda: sparse_mla.backward(**tensors, **outputs)), list(outputs.values())


def _decode():
    q = _many(_rows(1, 1, 128, 576, dtype=torch.bfloat16), 64, 1, 128, 576)
    cache = torch.zeros(16, 64, 1, 656, dtype=torch.uint8)
    indices = _many(torch.arange(1 << 20, dtype=torch.int32) % 1024, 64, 1, 1 << 20)
    out = torch.zeros(64, 1, 128, 512, dtype=torch.bfloat16)
    return (lambda: sparse_mla.decode(q, cache, indices, out=out)), [out]


def _scores():
    q, k, weights = _indexer(4, 8 << 20, h=128)
    out = torch.zeros(4, 8 << 20)
    return (lambda: indexer.scores(q, k, weights, out=out)), [out]


def _topk(rows):
    def make():
        q, k, weights = _indexer(1, 16 << 20)
        out = torch.zeros(1, rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        return (lambda: indexer.topk(q, k, weights, rows, out=(*out, None))), list(out)

    return make


def _paged():
    q = _rows(1, 1, 64, 128, dtype=torch.float8_e4m3fn)
    pages = torch.zeros(1, 64 * 132, dtype=torch.uint8)
    tables = torch.zeros(1, 1 << 18, dtype=torch.int32)
    length = torch.full((1,), 64 << 18, dtype=torch.int32)
    return q, pages, _rows(1, 1, 64), tables, length


def _topk_paged():
    step = _paged()
    out = torch.zeros(1, 1, 64, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return (lambda: indexer.topk_paged(*step, 64, out=(*out, None))), list(out)


def _scores_paged():
    step, out = _paged(), torch.zeros(1, 1, 64 << 18)
    return (lambda: indexer.scores_paged(*step, 64 << 18, out=out)), [out]


def _indexer_backward():
    q, _, weights = _indexer(512, 1)
    k, topk = _rows(1000, 128), 200_000
    indices = _many(torch.arange(topk, dtype=torch.int32) % 1000, 512, topk)
    d_scores = _many(_rows(topk), 512, topk)
    out = {"dq": torch.zeros(512, 64, 128), "dk": torch.zeros(1000, 128)}
    out["d_weights"] = torch.zeros(512, 64)
    return (lambda: indexer.backward(q, k, weights, indices, d_scores, **out)), list(out.values())


def _attention():
    tokens, sequences = 1 << 18, 64
    query, bias = _rows(sequences, 64, 128), _rows(64, 128)
    key, value = _rows(1, 1, 32, 32, 4), _rows(1, 1, 128, 32)
    tables = torch.zeros(sequences, tokens // 32, dtype=torch.int32)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32)
    term = _many(_rows(tokens), sequences, 64, tokens)
    out = torch.zeros_like(query)
    return (
        lambda: paged_xl.attention(query, key, value, bias, term, None, tables, lengths, out=out)
    ), [out]


def _compressor_forward():
    tokens = 1 << 28
    kv, bias = _many(_rows(1, 64), tokens, 64), _rows(128, 64)
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    out = torch.zeros(tokens // 128, 64)
    return (lambda: compressor.forward(kv, kv, bias, lengths, lengths // 128, out=out)), [out]


def _quantize():
    rows = 1 << 23
    out = torch.zeros(rows, 128, dtype=torch.uint8), torch.zeros(rows)
    x = _many(_rows(1, 128, dtype=torch.float16), rows, 128)
    return (lambda: indexer.quantize(x, out=out)), list(out)


def _store():
    rows = 1 << 21
    cache = torch.zeros(rows // 64, 64, 1, 656, dtype=torch.uint8)
    new = _many(_rows(1, 576, dtype=torch.bfloat16), rows, 576)
    slots = torch.arange(rows, dtype=torch.int32)
    return (lambda: sparse_mla.store(new, cache, slots)), [cache]


def _append():
    tokens, block = 1 << 20, 128
    new = _many(_rows(1, 1, 256), tokens, 1, 256)
    key = torch.zeros(tokens // block, 1, 64, block, 4)
    value = torch.zeros(tokens // block, 1, 256, block)
    slots = torch.arange(tokens)
    return (lambda: paged_xl.append(new, new, key, value, slots)), [key, value]


def _position_term():
    heads, length = 64, 1 << 20
    query, bias = _many(_rows(1, 1, 256), 1, heads, 256), _many(_rows(1, 256), heads, 256)
    r = _many(_rows(1, 1, 256), heads, length, 256)
    out, lengths = torch.zeros(1, heads, length), torch.full((1,), length, dtype=torch.int32)
    return (lambda: paged_xl.position_term(query, bias, r, lengths, out=out)), [out]


def _compressor_backward():
    tokens = 1 << 19
    kv, ends = _many(_rows(1, 512), tokens, 512), torch.tensor([0, tokens], dtype=torch.int32)
    out = {name: torch.zeros(tokens, 512) for name in ("d_kv", "d_gate")}
    bias = _rows(1, 512)
    return (lambda: compressor.backward(kv, kv, bias, ends, ends, kv, hadamard=True, **out)), list(
        out.values()
    )


def _compressor_step():
    tokens = 1 << 24
    kv = _many(_rows(1, 64, dtype=torch.bfloat16), tokens, 64)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    none, state = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 128, 128)
    out, bias = torch.zeros(tokens, 64, dtype=torch.bfloat16), _rows(128, 64)
    return (lambda: compressor.step(kv, kv, bias, ends, none, state, none, out=out)), [
        out[127::128],
        state,
    ]


def _alone(kind, **sizes):
    """A layer of one rank, which an interrupt breaks."""
    world = expert_parallel.InProcessWorld(1)
    return kind(world.transport(0), world.store(), experts=8, **sizes)


def _all_to_all():
    sizes = {"max_tokens": 1 << 19, "hidden": 64, "topk": 8}
    layer = _alone(expert_parallel.AllToAll, dtype="float32", **sizes)
    experts = _many(torch.arange(8, dtype=torch.int32), 1 << 19, 8)
    return layer, _many(_rows(1, 64), 1 << 19, 64), experts


def _dispatch():
    layer, rows, experts = _all_to_all()
    return (lambda: layer.dispatch(rows, experts)), []


def _combine():
    layer, rows, experts = _all_to_all()
    got, out = layer.dispatch(rows, experts), torch.zeros(1 << 19, 64)
    return (lambda: layer.combine(got.output, got.descriptor, out=out)), [out]


def _low_latency():
    sizes = {"max_tokens": 1 << 14, "hidden": 2048, "topk": 8}
    layer = _alone(expert_parallel.LowLatency, **sizes)
    experts = _many(torch.arange(8, dtype=torch.int32), 1 << 14, 8)
    return layer, _many(_rows(1, 2048, dtype=torch.bfloat16), 1 << 14, 2048), experts


def _low_latency_dispatch():
    layer, rows, experts = _low_latency()
    return (lambda: layer.dispatch(rows, experts)), []


def _low_latency_combine():
    layer, rows, experts = _low_latency()
    got = layer.dispatch(rows, experts, format="bfloat16")
    weights = _many(torch.ones(8), 1 << 14, 8)
    out = torch.zeros(1 << 14, 2048, dtype=torch.bfloat16)
    return (lambda: layer.combine(got.output, got, experts, weights, out=out)), [out]


def _notify():
    tokens = (1 << 31) - 1
    notifier = _alone(expert_parallel.Notifier)
    count = torch.tensor([tokens], dtype=torch.int32)
    counts = torch.tensor([tokens] + [0] * 7, dtype=torch.int32)
    in_rank = _many(torch.ones(1, 1, dtype=torch.bool), tokens, 1)
    return (lambda: notifier.notify(count, count, counts, in_rank)), []


def _layout():
    tokens = (1 << 28) - 1
    indices = _many(torch.arange(8, dtype=torch.int32), tokens, 8)
    out = [torch.zeros(n, dtype=torch.int32) for n in (1, 1, 256)]
    out.append(torch.zeros(tokens, 1, dtype=torch.bool))
    return (lambda: expert_parallel.layout(indices, 256, 1, 1, out=tuple(out))), out


def _operator():
    tensors = _sparse_mla(256, 1 << 17)
    return (lambda: ops.sparse_mla_attention(**tensors)), []


def _gradient():
    tensors = _sparse_mla(96, 4096)
    q = tensors.pop("q").clone().requires_grad_()
    out = ops.sparse_mla_attention(q, **tensors)
    return out.sum().backward, []


_CALLS = {
    "sparse_mla::forward": _forward_long_query,
    "sparse_mla::forward, many queries": _forward_many_queries,
    "sparse_mla::distribution": _distribution,
    "sparse_mla::backward": _backward,
    "sparse_mla::decode": _decode,
    "sparse_mla::store": _store,
    "indexer::scores": _scores,
    "indexer::topk": _topk(2048),
    "indexer::topk, by passes": _topk(40_000),
    "indexer::topk_paged": _topk_paged,
    "indexer::scores_paged": _scores_paged,
    "indexer::backward": _indexer_backward,
    "indexer::quantize": _quantize,
    "paged_xl::attention": _attention,
    "paged_xl::append": _append,
    "paged_xl::position_term": _position_term,
    "compressor::forward": _compressor_forward,
    "compressor::backward": _compressor_backward,
    "compressor::step": _compressor_step,
    "expert_parallel::all_to_all, dispatch": _dispatch,
    "expert_parallel::all_to_all, combine": _combine,
    "expert_parallel::low_latency, dispatch": _low_latency_dispatch,
    "expert_parallel::low_latency, combine": _low_latency_combine,
    "expert_parallel::notify": _notify,
    "expert_parallel::layout": _layout,
    "torch operator": _operator,
    "torch operator, gradient": _gradient,
}


def _small():
    q, kv, indices = (np.ones(s, np.float32) for s in ((3, 4, 576), (9, 1, 576), (3, 1, 5)))
    return sparse_mla.forward(q, kv, indices.astype(np.int32))[0]


def _interrupted(call):
    """The seconds until the call hears of a signal, which raises KeyboardInterrupt."""
    after = 0.02
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, after)
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return time.monotonic() - begin - after


def test_every_operation_has_a_call():
    listed = re.findall(r"^\| `(\w+::\w+)` \|", _README.read_text(), re.MULTILINE)
    tested = {what.split(", ")[0] for what in _CALLS}
    assert tested == {*listed, "torch operator"} and len(listed) >= 20


@pytest.mark.parametrize("what", _CALLS)
def test_an_interrupt_ends_a_call(what):
    call, outputs = _CALLS[what]()
    expected = _small()
    assert _interrupted(call) < _PATIENCE
    # As they were before the call, zeros: it did not end, and goes on nowhere.
    last = [output.reshape(-1)[-1:].view(torch.uint8) for output in outputs[-1:]]
    assert not any(one.any() for one in last), "written to its end"
    outputs = [output.reshape(-1)[::1021] for output in outputs]
    after = [output.clone() for output in outputs]
    np.testing.assert_array_equal(_small(), expected)
    time.sleep(0.1)
    for output, was in zip(outputs, after, strict=True):
        assert torch.equal(output, was), "written after the error"


def test_a_handler_that_raises_nothing_changes_nothing():
    call, (out,) = _forward(**_sparse_mla(2, 1 << 16, h_q=64))
    call()
    expected = out.clone()
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(float(_small().sum())))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        for _ in range(5):
            out.zero_()
            call()
            assert torch.equal(out, expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard and set(heard) == {float(_small().sum())}


def test_calls_of_other_threads_go_on():
    """Python gives signals to the main thread alone."""
    call, outputs = _forward(**_sparse_mla(2, 1 << 16))
    call()
    expected = outputs[0].clone()
    thread = threading.Thread(target=call)
    outputs[0].zero_()
    thread.start()
    _interrupted(_forward_long_query()[0])
    thread.join()
    assert torch.equal(outputs[0], expected)


def test_the_key_itself():
    """A process that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            _forward_long_query()[0]()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
