"""Checks of EPAll2AllLayer that torchrun starts on every rank; at the end the last rank dies.

They run on GPUs where the layer selects them, else on the CPU.

Usage: expert_program.py EXAMPLE FOLDER: runs the file EXAMPLE, then the checks below, and writes
rank R's report to FOLDER/R.json.
"""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import expert_oracle as oracle
import numpy as np
import torch
import torch.distributed as dist
from winnow.distributed import initialize_distributed

import winnow
from winnow.expert_parallel import (
    BarrierAllContext,
    DispatchCombineContext,
    EPAll2AllLayer,
    EPAllToAllLayoutDesc,
    EPConfig,
    barrier_all_on_stream,
)
from winnow.expert_parallel.rendezvous import default_device

TOKENS, HIDDEN, TOPK, EXPERTS = 300, 16, 3, 8  # more tokens than a chunk
DEVICE = torch.device("cpu")  # main() sets it


def _layer(rank, world, local, group=None, **options):
    return EPAll2AllLayer(
        group or dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, local, world, **options
    )


def _tokens(rank, n, dtype):
    values = 256 * rank + torch.arange(n)[:, None] % 256 + torch.zeros(n, HIDDEN)
    return values.to(dtype)  # whole numbers up to 1023; some are rounded in bfloat16


def routings(world):
    """{name: the indices of every rank}, the same on each rank."""
    rng = np.random.default_rng(11)

    def some(*counts, high=EXPERTS + 1):
        return [rng.integers(0, high, (n, TOPK)).astype(np.int32) for n in counts]

    return {
        "with dropped pairs": some(*[7 + 3 * rank for rank in range(world)]),
        "nothing on every other rank": some(*[0, 5] * (world // 2)),
        "all to one expert": [np.full((n, TOPK), 5, np.int32) for n in range(3, 3 + world)],
        "all dropped": [np.full((4, TOPK), EXPERTS, np.int32)] * world,
        "nothing at all": some(*[0] * world),
        "more than a chunk": some(*[290] * world),
    }


def check_routings(rank, world, local, dtype, local_combine):
    layer = _layer(rank, world, local, dtype=dtype, enable_local_combine=local_combine)
    name = str(dtype).removeprefix("torch.")
    for routing, indices in routings(world).items():
        inputs = [_tokens(source, len(t), dtype) for source, t in enumerate(indices)]
        weights = [np.random.default_rng(s).random(t.shape).astype(np.float32)
                   for s, t in enumerate(indices)]  # fmt: skip
        rows = oracle.expert_rows(indices, EXPERTS, world)[0][rank]
        tokens, mine = inputs[rank].to(DEVICE), torch.from_numpy(indices[rank].copy()).to(DEVICE)
        # Two outstanding descriptors, combined in the other order.
        plain, none, first = layer.dispatch(tokens, mine)
        output, given, second = layer.dispatch(
            input=tokens, exp_indices=mine, weight=torch.from_numpy(weights[rank]).to(DEVICE)
        )
        assert output.device == given.device == DEVICE == layer.device
        mine.fill_(0)
        assert none is None and output.shape == (len(rows), HIDDEN) and given.shape == (len(rows),)
        on_host, given_on_host = output.cpu(), given.cpu()
        for row, (source, token, k) in enumerate(rows):
            assert torch.equal(on_host[row], inputs[source][token]), (routing, row)
            assert given_on_host[row] == weights[source][token, k]
        assert torch.equal(plain, output)
        scaled = (output.float() * given[:, None]).to(dtype)

        def want(row_of, indices=indices):
            return oracle.combine(
                indices, EXPERTS, world, local, row_of, name, hidden=HIDDEN,
                local_combine=local_combine and world == local,
            )[rank]  # fmt: skip

        def weighted(source, token, k, inputs=inputs, weights=weights):
            row = inputs[source][token].float().numpy() * weights[source][token, k]
            return oracle.ROUND[name](row)

        back = layer.combine(scaled, second)
        np.testing.assert_array_equal(back.float().cpu().numpy(), want(weighted), routing)
        back = layer.combine(plain, first)
        unweighted = want(lambda source, token, k, i=inputs: i[source][token].float().numpy())
        np.testing.assert_array_equal(back.float().cpu().numpy(), unweighted, routing)
        assert first.num_dispatch_token_cur_rank == len(indices[rank])
        assert first.num_input_tokens_per_rank.tolist() == [len(t) for t in indices]
        # These scatter indices give the order that the layer has without them.
        flat = torch.from_numpy(np.concatenate([t.reshape(-1) for t in indices]))
        if len(flat) > 0:
            table = flat.argsort(stable=True).argsort().to(torch.int32).view(-1, TOPK)
            mine = torch.from_numpy(indices[rank]).to(DEVICE)
            again, _, third = layer.dispatch(tokens, mine, full_scatter_indices=table.to(DEVICE))
            assert torch.equal(again, output)
            assert torch.equal(third.token_dst_scatter_idx, second.token_dst_scatter_idx)
        # The layer follows other scatter indices.
        table, placed = oracle.scatter_table(indices, EXPERTS, world, lambda pairs: pairs[::-1])
        mine = torch.from_numpy(indices[rank]).to(DEVICE)
        turned = layer.dispatch(tokens, mine, None, torch.from_numpy(table).to(DEVICE))[0].cpu()
        for row, (source, token, _) in enumerate(placed[rank]):
            assert torch.equal(turned[row], inputs[source][token]), (routing, row)
        layer.ep_barrier_all(None)
    layer.finalize()
    layer.finalize()


def check_members(rank, world, local):
    layer = _layer(rank, world, local, use_aot=True, num_sm=7, enable_local_combine=True)
    nodes = world // local
    found = {
        name: getattr(layer, name)
        for name in (
            "offset_dtype max_tokens topk hidden dtype weight_dtype num_tot_experts "
            "experts_per_rank local_world_size world_size rank nnodes node_id is_intra_node "
            "enable_local_combine use_aot"
        ).split()
    }
    assert found == {
        "offset_dtype": torch.int32, "max_tokens": TOKENS, "topk": TOPK, "hidden": HIDDEN,
        "dtype": torch.bfloat16, "weight_dtype": torch.float32, "num_tot_experts": EXPERTS,
        "experts_per_rank": EXPERTS // world, "local_world_size": local, "world_size": world,
        "rank": rank, "nnodes": nodes, "node_id": rank // local, "is_intra_node": nodes == 1,
        "enable_local_combine": nodes == 1, "use_aot": True,
    }  # fmt: skip
    assert isinstance(layer, torch.nn.Module)
    assert layer.ep_config == EPConfig(
        TOKENS, HIDDEN, TOPK, EXPERTS, rank, world, local,
        torch.bfloat16, torch.float32, torch.int32,
    )  # fmt: skip
    assert layer.ep_config.num_experts_per_rank == EXPERTS // world
    assert layer.ep_config.is_intra_node == (nodes == 1)
    pairs = 2 * TOKENS * TOPK
    assert layer.a2a_ctx.dispatch_output_buf.shape == (pairs, HIDDEN)
    assert layer.a2a_ctx.weight_recv_buf.shape == (pairs,)
    assert layer.intra_node_barrier_ctx.is_intra_node
    assert layer.intra_node_barrier_ctx.local_rank == rank % local
    indices = torch.full((2, TOPK), rank, dtype=torch.int32, device=DEVICE)
    _, _, desc = layer.dispatch(_tokens(rank, 2, torch.bfloat16).to(DEVICE), indices)
    assert isinstance(desc, EPAllToAllLayoutDesc)
    assert list(desc.__dataclass_fields__)[:7] == [
        "num_dispatch_token_cur_rank", "num_input_tokens_per_rank", "send_reqs_recv_tensor",
        "topk_indices_tensor", "token_dst_scatter_idx", "skipped_token_mapping_indices",
        "skipped_token_topk_mapping_indices",
    ]  # fmt: skip
    table = (nodes, TOKENS, TOPK)
    assert desc.token_dst_scatter_idx.shape == table
    assert desc.token_dst_scatter_idx.dtype == torch.int32
    if nodes == 1:
        assert desc.send_reqs_recv_tensor is None
        assert torch.equal(desc.topk_indices_tensor, indices)
        assert desc.skipped_token_mapping_indices.dtype == torch.int64
        assert desc.skipped_token_topk_mapping_indices.shape[1] == TOPK
    else:
        assert desc.send_reqs_recv_tensor.shape == (nodes, 2, TOKENS)
        assert desc.topk_indices_tensor.shape == table
        assert desc.skipped_token_mapping_indices is None
        assert desc.skipped_token_topk_mapping_indices is None
    layer.ep_barrier_all(stream=None, intra_node_only=True)
    layer.finalize()


def check_contexts(rank, world, local):
    config = EPConfig(
        4, 8, 2, 2 * world, rank, world, local, torch.bfloat16, torch.float32, torch.int32
    )
    context = DispatchCombineContext.create(config)
    nodes = world // local
    i32, i64 = torch.int32, torch.int64
    buffers = {
        "send_reqs_for_nodes_rdma": ((nodes, 2, 4), i32, -1),
        "send_reqs_recv_bufs_rdma": ((nodes, 2, 4), i32, -1),
        "token_send_buf_rdma": ((nodes, 4, 8), torch.bfloat16, None),
        "dispatch_output_buf": ((2 * 4 * 2, 8), torch.bfloat16, None),
        "weight_recv_buf": ((2 * 4 * 2,), torch.float32, None),
        "topk_indices_buf_rdma": ((nodes, 4, 2), i32, None),
        "weight_send_buf_rdma": ((nodes, 4, 2), torch.float32, None),
        "signal_buf": ((world,), i64, 0),
        "splits_signal_buf": ((world,), i64, 0),
        "expert_indices_signal_buf": ((world,), i64, 0),
        "local_splits_buf": ((2 * world + 1,), i32, 0),
        "full_splits_buf": ((world, 2 * world + 1), i32, None),
        "num_input_tokens_per_rank_comm_buf": ((world,), i32, None),
        "intra_node_reduce_buf": ((nodes, 4, 8), torch.bfloat16, None),
        "intra_node_dispatch_skipped_token_mapping_indices": ((local * 8,), i64, -1),
        "intra_node_dispatch_skipped_token_topk_mapping_indices": ((local * 8, 2), i64, -1),
        "grid_sync_buf": ((world,), i32, None),
    }
    for name, (shape, dtype, value) in buffers.items():
        buffer = getattr(context, name)
        assert (buffer.shape, buffer.dtype) == (shape, dtype), name
        assert buffer is getattr(context, name)
        assert buffer.device == DEVICE
        assert value is None or (buffer == value).all()
    same = context.dispatch_output_buf
    assert context.reallocate_dispatch_output_buf(16)[0] is same
    rows, weights = context.reallocate_dispatch_output_buf(1024)
    assert rows.shape == (1024, 8) and weights.shape == (1024,)
    assert rows is context.dispatch_output_buf
    context.finalize()
    context.finalize()
    assert not hasattr(context, "signal_buf")


_late = 0


def check_waits(rank, ranks, barrier):
    """`ranks` leave the barrier after rank 1 has called it, late; others do not wait for it."""
    global _late
    _late += 1
    store, come = dist.group.WORLD.get_group_store(), f"late/{_late}"
    others = [f"left/{_late}/{r}" for r in range(dist.get_world_size()) if r not in ranks]
    if rank == 1:
        if others:
            store.wait(others, timedelta(seconds=15))
        time.sleep(0.1)
        store.set(come, "")
    barrier()
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()
    if rank in ranks:
        assert store.check([come])
    else:
        store.set(f"left/{_late}/{rank}", "")


def check_barriers(rank, world, local):
    everybody, node = range(world), range(1 // local * local, 1 // local * local + local)
    layer = _layer(rank, world, local)
    check_waits(rank, everybody, layer.ep_barrier_all)
    check_waits(rank, node, lambda: layer.ep_barrier_all(None, True))
    check_waits(rank, node, lambda: barrier_all_on_stream(layer.intra_node_barrier_ctx))
    layer.finalize()
    for is_intra_node in (True, False):
        context = BarrierAllContext(is_intra_node)
        assert (context.rank, context.num_local_ranks) == (rank, world)  # as torchrun says
        check_waits(rank, everybody, lambda context=context: barrier_all_on_stream(context))
        context.finalize()
    for _ in range(2):
        check_waits(rank, everybody, lambda: barrier_all_on_stream(None))


def refused(call, kind=ValueError):
    """The error that the call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("not refused")


def check_refusals(rank, world):
    layer = _layer(rank, world, world)
    tokens = _tokens(rank, 2, torch.bfloat16).to(DEVICE)
    zeros = torch.zeros(2, TOPK, dtype=torch.int32, device=DEVICE)
    error = refused(lambda: layer.dispatch(tokens, zeros.double() if rank == 1 else zeros))
    assert "rank 1: expert_indices: want dtype i32 or i64, got f64" in error.message
    layer.dispatch(tokens, zeros)
    dtype = torch.float16 if rank == 1 else torch.bfloat16
    error = refused(lambda: _layer(rank, world, world, dtype=dtype))
    others = "rank 0" if world == 2 else "ranks 0, 2, 3"
    wanted = f"dtype: want the same on every rank, got bf16 ({others}), f16 (rank 1)"
    assert wanted in error.message
    gpus = torch.cuda.device_count()
    # This GPU does not exist.
    error = refused(lambda: _layer(rank, world, world, device=f"cuda:{gpus}"), winnow.Error)
    assert (error.code, isinstance(error, ValueError)) == ("unsupported", False)
    wanted = "one GPU for each rank" if gpus else "a GPU, but there is none"
    assert error.operation == "expert_parallel::nvshmem"
    assert f"rank 0: device: want {wanted}" in error.message
    layer.finalize()


def check_gradients(rank, world, local):
    """The gradients of a mixture of linear experts equal those of the same model on one rank."""
    group = dist.new_group(list(range(world)))
    layer = _layer(rank, world, local, group, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator).to(DEVICE)
    tokens = torch.randn(world, 6, HIDDEN, generator=generator).to(DEVICE)
    scores = torch.rand(world, 6, TOPK, generator=generator).to(DEVICE)
    weigh = torch.randn(world, 6, HIDDEN, generator=generator).to(DEVICE)
    indices = torch.randint(0, EXPERTS + 1, (world, 6, TOPK), generator=generator).to(DEVICE)

    x, w = tokens[rank].clone().requires_grad_(), scores[rank].clone().requires_grad_()
    mine = experts[rank * EXPERTS // world : (rank + 1) * EXPERTS // world].clone()
    mine.requires_grad_()
    output, given, desc = layer.dispatch(x, indices[rank].int(), w)
    owner = torch.repeat_interleave(desc.descriptor.expert_counts.long())
    rows = torch.einsum("rh,rhj->rj", output, mine[owner]) * given[:, None]
    (layer.combine(rows, desc) * weigh[rank]).sum().backward()

    x_all, w_all = tokens.double().requires_grad_(), scores.double().requires_grad_()
    experts = experts.double().requires_grad_()
    none = torch.zeros(1, HIDDEN, HIDDEN, dtype=torch.double, device=DEVICE)
    chosen = torch.cat([experts, none])[indices]
    (torch.einsum("snh,snkhj,snk,snj->", x_all, chosen, w_all, weigh.double())).backward()
    part = experts.grad[rank * EXPERTS // world : (rank + 1) * EXPERTS // world]
    for got, want in ((x, x_all.grad[rank]), (w, w_all.grad[rank]), (mine, part)):
        torch.testing.assert_close(got.grad.double(), want, rtol=1e-4, atol=1e-4)
    layer.finalize()


def check_compiled(rank, world, local):
    """One graph of torch.compile gives the same values and gradients."""
    layer = _layer(rank, world, local, dtype=torch.float32, timeout=120)  # compiling takes long
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(3 + rank, HIDDEN, generator=generator).to(DEVICE)
    scores = torch.rand(3 + rank, TOPK, generator=generator).to(DEVICE)
    indices = torch.randint(0, EXPERTS + 1, scores.shape, generator=generator).int().to(DEVICE)

    def model(x, w):
        output, given, desc = layer.dispatch(x, indices, w)
        return layer.combine(output.sin() * given[:, None], desc)

    results = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            x, w = tokens.clone().requires_grad_(), scores.clone().requires_grad_()
            out = run(x, w)
            out.square().sum().backward()
            results.append((out, x.grad, w.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    layer.finalize()


def die(rank, world):
    """The last rank ends without a combine; returns the error of this rank, and when it came."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others
    if DEVICE.type == "cuda":
        os.environ["WINNOW_TIMEOUT_SECONDS"] = "3"  # a kernel waits so long for the dead rank
    layer = _layer(rank, world, world // 2)
    tokens = _tokens(rank, 4, torch.bfloat16).to(DEVICE)
    indices = torch.zeros(4, TOPK, dtype=torch.int32, device=DEVICE)
    output, _, desc = layer.dispatch(tokens, indices)
    if rank == world - 1:
        os._exit(7)
    start = time.monotonic()
    try:
        layer.combine(output, desc)
        if DEVICE.type == "cuda":  # the call returned; a later one raises its error
            torch.cuda.current_stream().synchronize()
            layer.ep_barrier_all()
    except winnow.Error as error:
        report = {"text": str(error), "code": error.code}
    report["seconds"] = time.monotonic() - start
    layer.finalize()
    return report


def main():
    example, folder = sys.argv[1:]
    exec(compile(Path(example).read_text(), example, "exec"), {"__name__": "example"})
    rank, world = initialize_distributed()
    assert random.random() == random.Random(3 + rank).random()
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3 + rank))
    global DEVICE
    DEVICE = default_device()
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    for local in (world, world // 2):
        check_routings(rank, world, local, torch.bfloat16, local_combine=True)
        check_routings(rank, world, local, torch.float32, local_combine=False)
        check_members(rank, world, local)
        check_contexts(rank, world, local)
        check_barriers(rank, world, local)
        check_gradients(rank, world, local)
    check_compiled(rank, world, local)
    check_refusals(rank, world)
    report = {"rank": rank, "checked": True}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    report["death"] = die(rank, world)
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    os._exit(0)  # gloo would wait for the dead rank


if __name__ == "__main__":
    main()
