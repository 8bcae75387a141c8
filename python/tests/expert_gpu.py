"""Helpers for tests of the all-to-all on a GPU, whose ranks are threads, each with a stream.

Loading a kernel at its first use waits for running kernels, and these may wait for the rank that
loads. So a world of one rank runs everything first.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import winnow.torch as ops
from expert_problems import SMALL, problem
from kinds import numbers
from ranks import Ranks

from winnow import expert_parallel as ep
from winnow.expert_parallel import autograd

CONFIG = {**SMALL, "device": "cuda", "timeout": 3}
SLEEP = 400_000_000  # GPU cycles: some tenths of a second


def cuda(array, dtype=None):
    """The array on the GPU, converted on the CPU."""
    return torch.from_numpy(np.array(array)).to(dtype).to("cuda")


def on_host(result):
    """A copy of a result with its tensors in numpy."""
    values = {n: getattr(result, n) for n in dir(result) if not n.startswith("_")}
    return SimpleNamespace(
        **{n: numbers(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    )


_one_records = threading.Lock()


def record(layer, inputs, rows):
    """A graph of dispatch and combine, whose experts return their inputs."""
    tokens = inputs[layer.rank].to("cuda")
    indices = torch.zeros(len(tokens), 3, dtype=torch.int32).to("cuda")
    weights = torch.ones(len(tokens), 3).to("cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with _one_records:
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            got = layer.dispatch(tokens, indices, weights=weights, worst_case_rows=rows)
            out = layer.combine(got.output, got.descriptor, weighted=True)
    return SimpleNamespace(
        tokens=tokens, indices=indices, weights=weights, graph=graph, got=got, out=out
    )


def learn(tokens, order, options, by_library):
    """Checks gradients of sum(g * sum over k of w * row^2); every rank has the same formula."""
    world = len(tokens)
    inputs, indices, weights = problem(6, tokens)
    rng = np.random.default_rng(8)
    weigh = [rng.standard_normal(x.shape).astype(np.float32) for x in inputs]
    inputs = [np.sin(x) for x in inputs]

    def body(layer, rank):
        x, w = cuda(inputs[rank]).requires_grad_(), cuda(weights[rank]).requires_grad_()
        rows, given, descriptor = autograd.dispatch(
            layer, x, cuda(indices[rank]), weights=w, order=order, **options
        )
        if order == "token_major":
            rows = rows * rows * given.sum(1)[:, None]
        else:
            rows = rows * rows if by_library else rows * rows * given[:, None]
        out = autograd.combine(layer, rows, descriptor, weights=given if by_library else None)
        # One thread of torch would run the ranks' backward passes on this GPU one after the other.
        with torch.autograd.set_multithreading_enabled(False):
            (out * cuda(weigh[rank])).sum().backward()
        kept = (indices[rank] >= 0) & (indices[rank] < 8)
        x_want = 2 * inputs[rank] * weigh[rank] * (weights[rank] * kept).sum(1)[:, None]
        w_want = (inputs[rank] ** 2 * weigh[rank]).sum(1)[:, None] * kept
        np.testing.assert_allclose(numbers(x.grad), x_want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(numbers(w.grad), w_want, rtol=1e-4, atol=1e-5)

    local = 2 if world > 1 else 1
    with Ranks(world, **CONFIG, local_world_size=local, arena_rows=1024) as ranks:
        ranks.run(body)


@pytest.fixture(scope="module")
def loaded():
    """Runs everything once that the ranks of the tests run on the GPU."""
    for tokens in (8, 0, 3):
        choice = cuda(np.zeros((tokens, 3), np.int32))
        ep.layout(choice, 8, 4, 2)
        ops.expert_parallel_layout(choice, 8, 4, 2)
        for options in ({}, {"copy_out": True}, {"worst_case_rows": 40}):
            learn((tokens,), "expert_major", options, True)
            learn((tokens,), "expert_major", options, False)
            learn((tokens,), "token_major", options, False)
    with Ranks(1, **CONFIG, arena_rows=4096) as ranks:
        ranks.run(lambda layer, rank: record(layer, [torch.zeros(8, 16)], 4))
