"""Ctrl-C during a long call on the CPU ends it at once, and the library works on."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
import winnow.torch as ops

from winnow import compressor, expert_parallel, indexer, paged_xl, sparse_mla

# Far more than any of these calls needs to hear of the signal, on a machine that does other things,
# too; and far less than the call itself takes.
_PATIENCE = 10.0  # seconds, of a busy machine; the calls take minutes


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


def _layout():
    tokens = (1 << 28) - 1
    indices = _many(torch.arange(8, dtype=torch.int32), tokens, 8)
    out = [torch.zeros(n, dtype=torch.int32) for n in (1, 1, 256)]
    in_rank = torch.zeros(tokens, 1, dtype=torch.bool)
    return (lambda: expert_parallel.layout(indices, 256, 1, 1, out=(*out, in_rank))), out


def _operator():
    tensors = _sparse_mla(256, 1 << 17)
    return (lambda: ops.sparse_mla_attention(**tensors)), []


def _gradient():
    tensors = _sparse_mla(96, 4096)
    q = tensors.pop("q").clone().requires_grad_()
    out = ops.sparse_mla_attention(q, **tensors)
    return out.sum().backward, []


_CALLS = {
    "forward of one long query": _forward_long_query,
    "forward of many queries": _forward_many_queries,
    "distribution": _distribution,
    "backward": _backward,
    "decode": _decode,
    "scores": _scores,
    "topk": _topk(2048),
    "topk by passes": _topk(40_000),
    "topk_paged": _topk_paged,
    "scores_paged": _scores_paged,
    "indexer backward": _indexer_backward,
    "paged attention": _attention,
    "compressor forward": _compressor_forward,
    "layout": _layout,
    "a torch operator": _operator,
    "a gradient": _gradient,
}


def _small():
    q, kv, indices = (np.ones(s, np.float32) for s in ((3, 4, 576), (9, 1, 576), (3, 1, 5)))
    return sparse_mla.forward(q, kv, indices.astype(np.int32))[0]


@pytest.mark.parametrize("what", _CALLS)
def test_an_interrupt_ends_a_long_call(what):
    call, outputs = _CALLS[what]()
    expected = _small()
    # A process that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, send)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        heard = time.monotonic() - sent[0]
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert heard < _PATIENCE
    after = [output.clone() for output in outputs]
    np.testing.assert_array_equal(_small(), expected)
    time.sleep(0.3)
    for output, was in zip(outputs, after, strict=True):
        assert torch.equal(output.view(torch.uint8), was.view(torch.uint8)), (
            "written after the error"
        )


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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            _forward_long_query()[0]()
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert torch.equal(outputs[0], expected)
