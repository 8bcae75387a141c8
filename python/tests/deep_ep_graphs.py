"""What test_deep_ep_gpu.py runs with torch.cuda.graph: a rank of two, each with a GPU."""

import functools

import torch
import torch.distributed as dist
from deep_ep_programs import dispatched
from winnow.compat import deep_ep

H, K, E, M = 512, 3, 12, 16


def replayed(group, given, step):
    """step() of tensors in place, captured once, replayed with what each of `given` puts there."""
    step()  # the layer is made here, not in the graph
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for put in given:
        put()
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert want.count_nonzero() and torch.equal(got, want)


def inputs(group):
    """x, idx and weights of this rank, and calls that put other numbers there."""

    def of(seed):
        generator = torch.Generator().manual_seed(10 * seed + group.rank())
        scores = torch.rand(8, E, generator=generator)
        absent = torch.rand(8, K, generator=generator) < 0.2
        made = [
            torch.randn(8, H, generator=generator).bfloat16(),
            scores.topk(K, dim=1).indices.masked_fill(absent, -1),
            torch.rand(8, K, generator=generator),
        ]
        return [tensor.cuda() for tensor in made]

    places = of(0)

    def put(tensors):
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)

    return places, [functools.partial(put, of(seed)) for seed in range(1, 4)]


def low_latency(group, use_fp8):
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    (x, idx, weights), given = inputs(group)

    def step():
        got, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=use_fp8)
        if use_fp8:
            rows, scales = got
            blocks = rows.float().unflatten(-1, (-1, 128)) * scales[..., None]
            got = blocks.flatten(-2).bfloat16()
        back, _, _ = buffer.low_latency_combine(got * 2, idx, weights, handle)
        return back, count

    replayed(group, given, step)


def worst_case(group):
    buffer = deep_ep.Buffer(group)
    (x, idx, weights), given = inputs(group)

    def step():
        (rows, rows_idx, rows_weights, _, handle, _), _ = dispatched(
            buffer, (x, idx, weights), num_worst_tokens=M * group.size()
        )
        back, home, _ = buffer.combine(rows, handle, topk_weights=rows_weights)
        return rows_idx, rows_weights, back, home

    replayed(group, given, step)
