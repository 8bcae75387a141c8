"""Ctrl-C during a call on the CPU ends it at once, and the library works on."""

import functools
import math
import signal
import threading
import time

import numpy as np
import pytest
import readme
import torch
import winnow.torch as ops
from interrupt import interrupted

import winnow
from winnow import compressor, expert_parallel, indexer, paged_xl, sparse_mla

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


def _rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _large(*shape, dtype=torch.float32):
    """A large tensor in little memory: all along its first dimension is the same."""
    return _rows(1, *shape[1:], dtype=dtype).expand(shape)


def _numbers(*shape, below):
    """Those of rows or experts, in as little."""
    return (torch.arange(shape[-1], dtype=torch.int32) % below).expand(shape)


def _zeros(*shape, dtype=torch.float32):
    """Those of numpy are no memory until they are written."""
    written = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(written).view(dtype).view(shape)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _into(function, *arguments, out, **options):
    """A call, and what it writes: `out` as the function takes it, or outputs by their names."""
    if isinstance(out, dict):
        return functools.partial(function, *arguments, **options, **out), list(out.values())
    written = [one for one in (out if isinstance(out, tuple) else (out,)) if one is not None]
    return functools.partial(function, *arguments, **options, out=out), written


def _sparse_mla(s_q, topk, h_q=128):
    indices = _numbers(s_q, 1, topk, below=1000)
    return {"q": _large(s_q, h_q, 576), "kv": _rows(1000, 1, 576), "indices": indices}


def _forward(s_q, topk, h_q=128):
    out = _zeros(s_q, h_q, 512)
    return _into(sparse_mla.forward, **_sparse_mla(s_q, topk, h_q), out=out)


def _forward_long_query():
    return _forward(2, 8 << 20)


def _backward():
    given, d_out = _sparse_mla(256, 20_000).values(), _large(256, 128, 512)
    out = {"dq": _zeros(256, 128, 576), "dkv": _zeros(1000, 1, 576)}
    lse = torch.full((256, 128), 40.0)
    return _into(sparse_mla.backward, *given, d_out, lse, d_out, out=out)


def _decode():
    return _into(
        sparse_mla.decode, _large(64, 1, 128, 576, dtype=torch.bfloat16),
        _zeros(16, 64, 1, 656, dtype=torch.uint8), _numbers(64, 1, 1 << 20, below=1024),
        out=_zeros(64, 1, 128, 512, dtype=torch.bfloat16),
    )  # fmt: skip


def _store():
    rows = 1 << 21
    cache = {"cache": _zeros(rows // 64, 64, 1, 656, dtype=torch.uint8)}
    slots = torch.arange(rows, dtype=torch.int32)
    new = _large(rows, 576, dtype=torch.bfloat16)
    return _into(sparse_mla.store, rows=new, slots=slots, out=cache)


def _indexer(s_q, s_k, h=64):
    return _large(s_q, h, 128), _large(s_k, 128), _large(s_q, h)


def _topk(rows):
    out = _zeros(1, rows, dtype=torch.int32), _zeros(1, dtype=torch.int32), None
    return _into(indexer.topk, *_indexer(1, 16 << 20), rows, out=out)


def _paged():
    pages = _zeros(1, 64 * 132, dtype=torch.uint8)
    tables = _zeros(1, 1 << 18, dtype=torch.int32)
    q = _rows(1, 1, 64, 128, dtype=torch.float8_e4m3fn)
    return q, pages, _rows(1, 1, 64), tables, _ints(64 << 18)


def _topk_paged():
    out = _zeros(1, 1, 64, dtype=torch.int32), _zeros(1, 1, dtype=torch.int32), None
    return _into(indexer.topk_paged, *_paged(), 64, out=out)


def _indexer_backward():
    q, _, weights = _indexer(512, 1)
    d_scores = _rows(200_000).expand(512, 200_000)
    out = {"dq": _zeros(512, 64, 128), "dk": _zeros(1000, 128)}
    out["d_weights"] = _zeros(512, 64)
    indices = _numbers(512, 200_000, below=1000)
    return _into(indexer.backward, q, _rows(1000, 128), weights, indices, d_scores, out=out)


def _quantize():
    rows = 1 << 23
    out = _zeros(rows, 128, dtype=torch.uint8), _zeros(rows)
    return _into(indexer.quantize, _large(rows, 128, dtype=torch.float16), out=out)


def _attention():
    tokens, sequences = 1 << 14, 64
    query, bias = _rows(sequences, 64, 128), _rows(64, 128)
    tables = _zeros(sequences, tokens // 32, dtype=torch.int32)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32)
    return _into(
        paged_xl.attention, query, _rows(1, 1, 32, 32, 4), _rows(1, 1, 128, 32), bias,
        _rows(tokens).expand(sequences, 64, tokens), None, tables, lengths,
        out=torch.zeros_like(query),
    )  # fmt: skip


def _append():
    tokens, block = 1 << 20, 128
    new = _large(tokens, 1, 256)
    caches = {"key_cache": _zeros(tokens // block, 1, 64, block, 4)}
    caches["value_cache"] = _zeros(tokens // block, 1, 256, block)
    given = {"key": new, "value": new, "slot_mapping": torch.arange(tokens)}
    return _into(paged_xl.append, **given, out=caches)


def _position_term():
    heads, length = 64, 1 << 20
    query, r = _large(1, heads, 256), _rows(1, 1, 256).expand(heads, length, 256)
    out = _zeros(1, heads, length)
    return _into(paged_xl.position_term, query, _large(heads, 256), r, _ints(length), out=out)


def _compressor_forward():
    tokens = 1 << 28
    kv, ends, out = _large(tokens, 64), _ints(0, tokens), _zeros(tokens // 128, 64)
    return _into(compressor.forward, kv, kv, _rows(128, 64), ends, ends // 128, out=out)


def _compressor_backward():
    tokens = 1 << 19
    kv, ends = _large(tokens, 512), _ints(0, tokens)
    out = {name: _zeros(tokens, 512) for name in ("d_kv", "d_gate")}
    given = kv, kv, _rows(1, 512), ends, ends, None, None, kv
    return _into(compressor.backward, *given, hadamard=True, out=out)


def _compressor_step():
    tokens = 1 << 24
    kv, state = _large(tokens, 64, dtype=torch.bfloat16), _zeros(1, 128, 128)
    given = kv, kv, _rows(128, 64), _ints(0, tokens), _ints(0), state, _ints(0)
    out = _zeros(tokens, 64, dtype=torch.bfloat16)
    call, _ = _into(compressor.step, *given, out=out)
    return call, [out[127::128], state]


def _alone(kind, **sizes):
    """A layer of one rank, which an interrupt breaks."""
    world = expert_parallel.InProcessWorld(1)
    return kind(world.transport(0), world.store(), experts=8, **sizes)


def _all_to_all(combines):
    tokens = 1 << 19
    sizes = {"max_tokens": tokens, "hidden": 64, "topk": 8, "dtype": "float32"}
    layer = _alone(expert_parallel.AllToAll, **sizes)
    given = _large(tokens, 64), _numbers(tokens, 8, below=8)
    if not combines:
        return functools.partial(layer.dispatch, *given), []
    got = layer.dispatch(*given)
    return _into(layer.combine, got.output, got.descriptor, out=_zeros(tokens, 64))


def _low_latency(combines):
    tokens, bf16 = 1 << 14, torch.bfloat16
    layer = _alone(expert_parallel.LowLatency, max_tokens=tokens, hidden=2048, topk=8)
    rows, experts = _large(tokens, 2048, dtype=bf16), _numbers(tokens, 8, below=8)
    if not combines:
        return functools.partial(layer.dispatch, rows, experts), []
    got = layer.dispatch(rows, experts, format="bfloat16")
    given = got.output, got, experts, torch.ones(8).expand(tokens, 8)
    return _into(layer.combine, *given, out=_zeros(tokens, 2048, dtype=bf16))


def _notify():
    tokens = (1 << 31) - 1
    count, in_rank = _ints(tokens), torch.ones(1, 1, dtype=torch.bool).expand(tokens, 1)
    notifier = _alone(expert_parallel.Notifier)
    return functools.partial(notifier.notify, count, count, _ints(tokens, *[0] * 7), in_rank), []


def _layout():
    tokens = (1 << 28) - 1
    out = [_zeros(n, dtype=torch.int32) for n in (1, 1, 256)]
    out.append(_zeros(tokens, 1, dtype=torch.bool))
    indices = _numbers(tokens, 8, below=8)
    return _into(expert_parallel.layout, indices, 256, 1, 1, out=tuple(out))


def _gradient():
    tensors = _sparse_mla(48, 4096)
    q = tensors.pop("q").clone().requires_grad_()
    return ops.sparse_mla_attention(q, **tensors).sum().backward, []


_CALLS = {
    "sparse_mla::forward": _forward_long_query,
    "sparse_mla::forward, many queries": lambda: _forward(512, 1 << 16),
    "sparse_mla::distribution": lambda: _into(
        sparse_mla.distribution, **_sparse_mla(4, 4 << 20), lse=_zeros(4, 128),
        out=_zeros(4, 4 << 20),
    ),
    "sparse_mla::backward": _backward,
    "sparse_mla::decode": _decode,
    "sparse_mla::store": _store,
    "indexer::scores": lambda: _into(
        indexer.scores, *_indexer(4, 8 << 20, h=128), out=_zeros(4, 8 << 20)
    ),
    "indexer::topk": lambda: _topk(2048),
    "indexer::topk, by passes": lambda: _topk(40_000),
    "indexer::topk_paged": _topk_paged,
    "indexer::scores_paged": lambda: _into(
        indexer.scores_paged, *_paged(), 64 << 18, out=_zeros(1, 1, 64 << 18)
    ),
    "indexer::backward": _indexer_backward,
    "indexer::quantize": _quantize,
    "paged_xl::attention": _attention,
    "paged_xl::append": _append,
    "paged_xl::position_term": _position_term,
    "compressor::forward": _compressor_forward,
    "compressor::backward": _compressor_backward,
    "compressor::step": _compressor_step,
    "expert_parallel::all_to_all, dispatch": lambda: _all_to_all(combines=False),
    "expert_parallel::all_to_all, combine": lambda: _all_to_all(combines=True),
    "expert_parallel::low_latency, dispatch": lambda: _low_latency(combines=False),
    "expert_parallel::low_latency, combine": lambda: _low_latency(combines=True),
    "expert_parallel::notify": _notify,
    "expert_parallel::layout": _layout,
    "torch operator": lambda: (
        functools.partial(ops.sparse_mla_attention, **_sparse_mla(256, 1 << 17)), [],
    ),
    "torch operator, gradient": _gradient,
}  # fmt: skip


def _small():
    q, kv, indices = (np.ones(s, np.float32) for s in ((3, 4, 576), (9, 1, 576), (3, 1, 5)))
    return sparse_mla.forward(q, kv, indices.astype(np.int32))[0]


def test_every_operation_has_a_call():
    listed = readme.operations()
    tested = {what.split(", ")[0] for what in _CALLS}
    assert tested == {*listed, "torch operator"} and len(listed) >= 20


@pytest.mark.parametrize("what", _CALLS)
def test_an_interrupt_ends_a_call(what):
    call, outputs = _CALLS[what]()
    expected = _small()
    assert interrupted(call, 0.02) < _PATIENCE
    # As they were before the call, zeros: it did not end, and goes on nowhere.
    last = [output.reshape(-1)[-1:].view(torch.uint8) for output in outputs[-1:]]
    assert not any(one.any() for one in last), "written to its end"
    outputs = [output.reshape(-1)[:: 1 + output.numel() // 30_000] for output in outputs]
    after = [output.clone() for output in outputs]
    np.testing.assert_array_equal(_small(), expected)
    time.sleep(0.1)
    for output, was in zip(outputs, after, strict=True):
        assert torch.equal(output, was), "written after the error"


def test_memory_between_two_loops_of_a_call_is_not_cleared_first():
    """2 GiB of partial results, in which no worker asks for interrupts, took two seconds."""
    sequences, tokens = 128, 1 << 18
    query, bias = _rows(sequences, 64, 128), _rows(64, 128)
    call = functools.partial(
        paged_xl.attention, query, _rows(1, 1, 32, 32, 4), _rows(1, 1, 128, 32), bias,
        _rows(tokens).expand(sequences, 64, tokens), 0.1,
        _zeros(1, tokens // 32, dtype=torch.int32).expand(sequences, -1),
        torch.full((sequences,), tokens, dtype=torch.int32), check=False,
    )  # fmt: skip
    begin = time.process_time()
    interrupted(call, 0.02)
    assert time.process_time() - begin < 1


def test_a_handler_that_raises_nothing_changes_nothing():
    call, (out,) = _forward(2, 1 << 16, h_q=64)
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
    call, outputs = _forward(2, 1 << 16)
    call()
    expected = outputs[0].clone()
    thread = threading.Thread(target=call)
    outputs[0].zero_()
    thread.start()
    interrupted(_forward_long_query()[0], 0.02)
    thread.join()
    assert torch.equal(outputs[0], expected)
