"""The all-to-all on GPUs, against the oracles of the CPU tests. Skipped without a GPU.

The ranks of a world are threads, each with a stream, on one GPU. A kernel must not be loaded, at
its first use, while another rank's waits for this one: a world of one rank goes first.
"""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import expert_oracle as oracle
import numpy as np
import pytest
import torch
import winnow.torch as ops
from expert_checks import check_float8_rows, check_rows, check_tables
from expert_launch import HERE, alone, documented_program  # noqa: F401
from expert_problems import SMALL, float8_problem, payload, problem, routing
from kinds import gpu, numbers
from ranks import Ranks, new_stream, run_all, run_each
from winnow.distributed import initialize_distributed

import winnow
from winnow import expert_parallel as ep
from winnow.expert_parallel import autograd

pytestmark = gpu

CONFIG = {**SMALL, "device": "cuda", "timeout": 3}
SLEEP = 400_000_000  # GPU cycles: some tenths of a second


def cuda(array, dtype=None):
    """On the GPU, converted before."""
    return torch.from_numpy(np.array(array)).to(dtype).to("cuda")


def on_host(result):
    """The tensors of a result in numpy, its numbers as they are."""
    values = {n: getattr(result, n) for n in dir(result) if not n.startswith("_")}
    return SimpleNamespace(
        **{n: numbers(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    )


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Everything that the ranks below run on the GPU has run once."""
    for tokens in (8, 0, 3):
        choice = cuda(np.zeros((tokens, 3), np.int32))
        ep.layout(choice, 8, 4, 2)
        ops.expert_parallel_layout(choice, 8, 4, 2)
        for options in ({}, {"copy_out": True}, {"worst_case_rows": 40}):
            _learn((tokens,), "expert_major", options, True)
            _learn((tokens,), "expert_major", options, False)
            _learn((tokens,), "token_major", options, False)
    with Ranks(1, **CONFIG, arena_rows=4096) as ranks:
        ranks.run(lambda layer, rank: _record(layer, [torch.zeros(8, 16)], 4))


# ---- Rows, tables and sums.


@pytest.mark.parametrize("local", [4, 2, 1])
@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_and_tables(local, alignment):
    inputs, indices, weights = problem()
    rows, counts, offsets = oracle.expert_rows(indices, 8, 4, alignment)

    def body(layer, rank):
        assert layer.device == "cuda:0"
        got = layer.dispatch(
            cuda(inputs[rank]), cuda(indices[rank]), weights=cuda(weights[rank]),
            expert_alignment=alignment,
        )  # fmt: skip
        for tensor in (got.output, got.weights, got.descriptor.expert_offsets):
            assert tensor.device == torch.device("cuda", 0)
        described = on_host(got.descriptor)
        check_rows(on_host(got), rows[rank], inputs, weights)
        check_tables(described, rows, indices, rank, local)
        assert described.rows == described.wanted_rows == len(rows[rank])
        assert described.expert_counts.tolist() == counts[rank]
        assert described.expert_offsets.tolist() == offsets[rank]
        assert (described.host_expert_counts, described.host_expert_offsets) == (
            counts[rank], offsets[rank],
        )  # fmt: skip
        assert described.num_input_tokens_per_rank.tolist() == [5, 0, 8, 3]

    with Ranks(4, **CONFIG, local_world_size=local) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("local", [4, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("local_combine", [False, True])
def test_combine_rounds_where_the_contract_says(local, dtype, local_combine):
    """Bitwise, with outputs that differ between a token's experts."""
    rng = np.random.default_rng(5)
    _, indices, weights = problem(seed=2)
    make, typed = oracle.ROUND[dtype], getattr(torch, dtype)
    expert_row = {
        pair[:3]: make(rng.standard_normal(16).astype(np.float32) * 10.0 ** rng.integers(-2, 3))
        for pair in oracle.kept(indices, 8)
    }
    bias = [make(rng.standard_normal((len(table), 16)).astype(np.float32)) for table in indices]
    rows = oracle.expert_rows(indices, 8, 4)[0]

    def want(**options):
        return oracle.combine(
            indices, 8, 4, local, lambda *pair: expert_row[pair], dtype,
            hidden=16, local_combine=local_combine, **options,
        )  # fmt: skip

    plain, weighted = want(), want(weights=weights, bias=bias)

    def body(layer, rank):
        tokens = torch.zeros(len(indices[rank]), 16, dtype=typed).to("cuda")
        got = layer.dispatch(tokens, cuda(indices[rank]), weights=cuda(weights[rank]))
        outputs = [expert_row[pair] for pair in rows[rank]] or np.zeros((0, 16), np.float32)
        outputs = cuda(np.array(outputs, np.float32), typed)
        out = layer.combine(outputs, got.descriptor)
        assert (out.dtype, out.device) == (typed, tokens.device)
        buffer = layer.combine_buffer(got.descriptor)
        buffer.copy_(outputs)
        given = torch.empty_like(tokens)
        back = layer.combine(
            buffer, got.descriptor, weighted=True, out=given, bias=cuda(bias[rank], typed)
        )
        assert back is given
        np.testing.assert_array_equal(numbers(out), plain[rank])
        np.testing.assert_array_equal(numbers(given), weighted[rank])

    config = {**CONFIG, "dtype": typed, "local_world_size": local}
    with Ranks(4, **config, enable_local_combine=local_combine) as ranks:
        ranks.run(body)


def test_token_major_rows_carry_each_token_once():
    inputs, indices, weights = problem(seed=1)
    rows = oracle.token_rows(indices, 8, 4)

    def body(layer, rank):
        got = layer.dispatch(
            cuda(inputs[rank]), cuda(indices[rank]), weights=cuda(weights[rank]),
            order="token_major",
        )  # fmt: skip
        got = on_host(got)
        assert got.output.shape[0] == len(rows[rank]) and got.descriptor.order == "token_major"
        for row, (source, token, here) in enumerate(rows[rank]):
            np.testing.assert_array_equal(got.output[row], inputs[source][token])
            assert got.expert_ids[row].tolist() == here
            kept = np.where(np.array(here) >= 0, weights[source][token], 0)
            np.testing.assert_array_equal(got.weights[row], kept)

    with Ranks(4, **CONFIG, local_world_size=2) as ranks:
        ranks.run(body)


def test_rows_of_the_callers_choice_and_a_repeated_routing():
    inputs, indices, weights = problem(seed=3)
    rng = np.random.default_rng(9)
    table, rows = oracle.scatter_table(indices, 8, 4, lambda pairs: rng.permutation(pairs).tolist())
    rows = [[tuple(pair) for pair in mine] for mine in rows]
    other = [values + 0.5 for values in inputs]

    def body(layer, rank):
        choice = cuda(indices[rank])
        got = layer.dispatch(cuda(inputs[rank]), choice, scatter_indices=cuda(table))
        torch.cuda.current_stream().synchronize()
        choice.copy_(torch.zeros(choice.shape, dtype=choice.dtype))  # the descriptor has its own
        again = layer.dispatch(
            cuda(other[rank]), weights=cuda(weights[rank]), cached=got.descriptor
        )
        check_rows(on_host(got), rows[rank], inputs)
        check_rows(on_host(again), rows[rank], other, weights)

    with Ranks(4, **CONFIG, local_world_size=2) as ranks:
        ranks.run(body)


def test_float8_tokens_travel_with_their_scales():
    indices, bytes_of, scales = float8_problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]

    def body(layer, rank):
        got = layer.dispatch(
            cuda(bytes_of[rank]).view(torch.float8_e4m3fn), cuda(indices[rank]),
            scales=cuda(scales[rank]),
        )  # fmt: skip
        assert got.output.dtype == torch.float8_e4m3fn
        octets, factors = numbers(got.output.view(torch.uint8)), numbers(got.scales)
        check_float8_rows(octets, factors, rows[rank], bytes_of, scales)

    config = {**CONFIG, "hidden": 144, "dtype": "bfloat16"}
    with Ranks(4, **config, local_world_size=2) as ranks:
        ranks.run(body)


# ---- Streams, graphs, memory.

_one_records = threading.Lock()


def _record(layer, inputs, rows):
    """A graph of dispatch, experts that give back what they get, and combine."""
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


def test_a_graph_replays_with_new_tokens_and_routings():
    """No host takes part in a call whose size is fixed; too many rows are the next call's error."""
    sizes = (5, 0, 8, 3)
    meet = threading.Barrier(4)

    def body(layer, rank):
        recorded = _record(layer, [torch.zeros(n, 16) for n in sizes], 40)
        meet.wait(20)  # recording waits for the whole GPU
        assert recorded.got.descriptor.wanted_rows == -1
        assert recorded.got.descriptor.host_expert_counts is None
        for seed in range(3):
            inputs, indices, weights = problem(seed)
            rows, counts, _ = oracle.expert_rows(indices, 8, 4)
            sums = oracle.combine(
                indices, 8, 4, 2, lambda s, t, k, x=inputs: x[s][t], hidden=16, weights=weights
            )
            recorded.tokens.copy_(torch.from_numpy(inputs[rank]))
            recorded.indices.copy_(torch.from_numpy(indices[rank]))
            recorded.weights.copy_(torch.from_numpy(weights[rank]))
            recorded.graph.replay()
            got = on_host(recorded.got)
            count = len(rows[rank])
            check_rows(
                SimpleNamespace(output=got.output[:count], weights=got.weights[:count]),
                rows[rank], inputs, weights,
            )  # fmt: skip
            assert (got.weights[count:] == 0).all()
            assert on_host(recorded.got.descriptor).expert_counts.tolist() == counts[rank]
            np.testing.assert_array_equal(numbers(recorded.out), sums[rank])
        recorded.indices.copy_(torch.zeros(recorded.indices.shape, dtype=torch.int32))
        recorded.graph.replay()  # 48 pairs to rank 0
        torch.cuda.current_stream().synchronize()
        meet.wait(20)
        with pytest.raises(ValueError, match="rank 0: worst_case_rows: want 48 or more, got 40"):
            layer.barrier()
        layer.barrier()
        torch.cuda.current_stream().synchronize()
        meet.wait(20)
        del recorded

    with Ranks(4, **CONFIG, local_world_size=2, arena_rows=4096) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_call_joins_its_stream_and_does_not_wait(explicit):
    tokens, indices = cuda(payload(0, 8)), cuda(routing(np.random.default_rng(0), 8, dropped=0))
    with Ranks(1, **CONFIG, arena_rows=4096) as ranks:
        (layer,) = ranks.layers
        torch.cuda.synchronize()
        side, begun = torch.cuda.Stream(), torch.cuda.Event()
        options = {"stream": side} if explicit else {}
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            begun.record()
        with torch.cuda.stream(None if explicit else side):
            got = layer.dispatch(tokens, indices, worst_case_rows=24, **options)
            layer.barrier(**options)
            out = layer.combine(got.output, got.descriptor, **options)
            done = side.record_event()
        assert not begun.query()  # all came back while the stream sleeps
        assert torch.cuda.default_stream().query() and not done.query()
        side.synchronize()
        np.testing.assert_array_equal(numbers(out), 3 * numbers(tokens))


def test_outputs_outlive_the_layer_and_copies_leave_the_arena():
    tokens, indices = cuda(payload(0, 8)), cuda(np.zeros((8, 3), np.int32))
    with Ranks(1, **CONFIG, arena_rows=1024) as ranks:
        (layer,) = ranks.layers
        borrowed = layer.dispatch(tokens, indices)
        settled = layer.arena_bytes
        kept = [autograd.dispatch(layer, tokens, indices, copy_out=True)[0] for _ in range(200)]
        assert layer.arena_bytes == settled
        assert len({t.data_ptr() for t in kept}) == 200
    want = numbers(tokens).repeat(3, 0)
    for tensor in (borrowed.output, kept[0], kept[-1]):
        np.testing.assert_array_equal(numbers(tensor), want)


@pytest.mark.parametrize("options", [{}, {"worst_case_rows": 40}])
def test_out_takes_the_rows(options):
    inputs, indices, weights = problem(5)
    rows, _, _ = oracle.expert_rows(indices, 8, 4)

    def body(layer, rank):
        out = torch.full((50, 19), -7.0).to("cuda")
        got = layer.dispatch(
            cuda(inputs[rank]), cuda(indices[rank]), weights=cuda(weights[rank]),
            out=out[:, :16], **options,
        )  # fmt: skip
        assert got.output.data_ptr() == out.data_ptr()
        used, given = len(rows[rank]), numbers(out)
        got = SimpleNamespace(output=given[:used, :16], weights=numbers(got.weights)[:used])
        check_rows(got, rows[rank], inputs, weights)
        count = options.get("worst_case_rows", used)
        assert (given[count:] == -7).all() and (given[:, 16:] == -7).all()
        if not options:
            with pytest.raises(
                ValueError, match=f"out: want {len(rows[0])} rows or more on rank 0"
            ):
                layer.dispatch(
                    cuda(inputs[rank]), cuda(indices[rank]), out=out[: 50 * (rank > 0), :16]
                )
            layer.barrier()

    with Ranks(4, **CONFIG, local_world_size=2, arena_rows=1024) as ranks:
        ranks.run(body)


# ---- Gradients.


def _learn(tokens, order, options, by_library):
    """Gradients of sum(g * sum over k of w * row^2), whose formula is the same on every rank."""
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


@pytest.mark.parametrize("order", ["expert_major", "token_major"])
@pytest.mark.parametrize("options", [{}, {"copy_out": True}, {"worst_case_rows": 40}])
def test_gradients(order, options):
    _learn((5, 0, 8, 3), order, options, by_library=order == "expert_major" and options == {})


# ---- Compiled code.


def _mixture(layer, x, w, indices):
    """Whose experts square what they get; its size is fixed."""
    rows, given, descriptor = autograd.dispatch(layer, x, indices, weights=w, worst_case_rows=24)
    used = torch.arange(24, device=x.device) < descriptor.expert_offsets[-1]
    rows = torch.where(used[:, None], rows * rows * given[:, None], 0.0)
    return autograd.combine(layer, rows, descriptor)


def _mixture_want(x, w, indices):
    kept = (indices >= 0) & (indices < 8)
    return x * x * (w * kept).sum(1)[:, None]


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_has_values_and_gradients():
    torch._dynamo.reset()
    inputs, indices, weights = problem(6, (8,))
    x, w = cuda(np.sin(inputs[0])).requires_grad_(), cuda(weights[0]).requires_grad_()
    choice = cuda(indices[0])
    with Ranks(1, **CONFIG, arena_rows=1024) as ranks:
        out = torch.compile(_mixture, fullgraph=True)(ranks.layers[0], x, w, choice)
        out.sum().backward()
    got = [out, x.grad, w.grad]
    x.grad = w.grad = None
    want = _mixture_want(x, w, choice)
    want.sum().backward()
    for one, other in zip(got, [want, x.grad, w.grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_torch_records_leave_our_calls_out():
    torch._dynamo.reset()
    compiled = torch.compile(_mixture, fullgraph=True, mode="reduce-overhead")
    with Ranks(1, **CONFIG, arena_rows=4096) as ranks, torch.no_grad():
        for seed in range(6):
            tokens, choice, weights = (cuda(t[0]) for t in problem(seed, (8,)))
            out = compiled(ranks.layers[0], tokens, weights, choice)
            want = _mixture_want(tokens, weights, choice)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def _plain_mixture(layer, x, w, indices):
    """The same by the layer's own calls, with rows in memory of their own."""
    got = layer.dispatch(x, indices, weights=w, worst_case_rows=24, copy_out=True)
    used = torch.arange(24, device=x.device) < got.descriptor.expert_offsets[-1]
    rows = torch.where(used[:, None], got.output * got.output * got.weights[:, None], 0.0)
    return layer.combine(rows, got.descriptor)


MIXTURES = {
    "compiled": lambda: torch.compile(_mixture, fullgraph=True),
    "eager": lambda: _mixture,
    "plain": lambda: _plain_mixture,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", MIXTURES)
def test_what_a_graph_records_keeps_its_memory(how):
    """Also the descriptor and the rows that nobody else has."""
    torch._dynamo.reset()
    mixture = MIXTURES[how]()
    x, indices, w = (cuda(t[0]) for t in problem(0, (8,)))

    def body(layer, rank):
        with torch.no_grad():
            mixture(layer, x, w, indices)  # compiles
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = mixture(layer, x, w, indices)
            for seed in range(1, 4):
                tokens, choice, weights = (cuda(t[0]) for t in problem(seed, (8,)))
                others = [layer.dispatch(tokens, choice, copy_out=i % 2 == 1) for i in range(8)]
                before = [other.output.clone() for other in others]
                x.copy_(tokens), w.copy_(weights), indices.copy_(choice)
                graph.replay()
                assert torch.equal(out, mixture(layer, tokens, weights, choice))
                for other, rows in zip(others, before, strict=True):
                    assert torch.equal(other.output, rows)  # not written to by the graph
                want = _mixture_want(tokens, weights, choice)
                torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
            stream.synchronize()
            del graph

    with Ranks(1, **CONFIG, arena_rows=4096) as ranks:
        ranks.run(body)


# ---- Errors.


def test_a_mistake_of_one_rank_is_an_error_on_all():
    inputs, indices, _ = problem()

    def body(layer, rank):
        tokens, choice = cuda(inputs[rank]), cuda(indices[rank])
        wrong, copied, wide = rank == 2, numbers(tokens), cuda(indices[rank].astype(np.int64))
        for mistake, text in [
            ((torch.from_numpy(copied) if wrong else tokens, choice), "input: want device cuda:0"),
            ((tokens, wide if wrong else choice), "expert_indices: want dtype i32"),
            ((copied if wrong else tokens, choice), "input: want device cuda:0, got cpu"),
            (("none" if wrong else tokens, choice), "input: want a tensor"),
        ]:
            with pytest.raises(ValueError, match=text):
                layer.dispatch(*mistake)
        got = layer.dispatch(tokens, choice)
        layer.combine(got.output, got.descriptor)
        return numbers(got.output)

    with Ranks(4, **CONFIG) as ranks:
        ranks.run(body)


def test_a_rank_that_does_not_come_is_named():
    def body(layer, rank):
        tokens, choice = cuda(payload(0, 2)), cuda(np.zeros((2, 3), np.int32))
        if rank == 0:
            return layer.dispatch(tokens, choice)

    with Ranks(2, **{**CONFIG, "timeout": 0.5}) as ranks:
        error, _ = ranks.try_run(body)
        assert isinstance(error, winnow.Error) and error.code == "timeout", error
        assert "rank 1" in str(error)


def test_ranks_that_share_a_gpu_need_streams():
    world = ep.InProcessWorld(2)

    def body(rank):
        with new_stream():
            layer = ep.AllToAll(world.transport(rank), world.store(), **CONFIG)
        with pytest.raises(ValueError, match="stream: want one of this rank's own"):
            layer.barrier()
        layer.close()

    run_all(2, body)


def test_nvshmem_says_what_is_missing():
    store, many = ep.MemoryStore(), torch.cuda.device_count()

    def in_one_process(rank):
        return ep.create_nvshmem(store, rank, 2, f"cuda:{rank * many}", timeout=5)

    errors = run_each(2, in_one_process)
    assert {(type(e), e.code, str(e)) for e in errors} == {
        (
            winnow.Error,
            "unsupported",
            "expert_parallel::nvshmem: rank 1: device: want one GPU for each rank, got "
            f"cuda:{many} on a machine with {many}",
        )
    }


# ---- Counts.


def test_layout_and_notify():
    rng = np.random.default_rng(3)
    tokens = [7, 0, 12, 5]
    indices = [routing(rng, n) for n in tokens]
    layouts = [oracle.layout(table, 8, 4, 2) for table in indices]
    world = ep.InProcessWorld(4)
    streams = [new_stream() for _ in tokens]

    def body(rank):
        with streams[rank]:
            notifier = ep.Notifier(
                world.transport(rank), world.store(), experts=8, local_world_size=2, timeout=5,
                device="cuda",
            )  # fmt: skip
            counts = ep.layout(cuda(indices[rank]), 8, 4, 2)
            operator = ops.expert_parallel_layout(cuda(indices[rank]), 8, 4, 2)
            for one, other, want in zip(counts, operator, layouts[rank], strict=True):
                np.testing.assert_array_equal(numbers(one), want)
                np.testing.assert_array_equal(numbers(other), want)
            got = notifier.notify(*counts, channels=4, expert_alignment=8)
            received = np.cumsum([layouts[source][0][rank] for source in range(4)])
            pairs = sum(layouts[source][2][2 * rank : 2 * rank + 2] for source in range(4))
            aligned = -(-pairs // 8) * 8
            totals = notifier.totals
            assert totals.recv_tokens == received[-1]
            assert totals.recv_pairs_per_expert == aligned.tolist()
            again = notifier.notify(*counts, channels=4, worst_case_rows=99)
            assert notifier.totals.recv_tokens == -1
            for one in (got, again):
                np.testing.assert_array_equal(numbers(one.recv_rank_prefix_sum), received)
            np.testing.assert_array_equal(numbers(got.recv_pairs_per_expert), aligned)
            np.testing.assert_array_equal(numbers(again.recv_pairs_per_expert), pairs)
            torch.cuda.current_stream().synchronize()

    run_all(4, body)


def test_supports_names_the_backend():
    for op in ("dispatch", "combine", "layout", "notify"):
        answer = winnow.supports(f"expert_parallel.{op}", device="cuda")
        assert answer.backend == ("cuda" if op == "layout" else "sm90"), answer
        assert not winnow.supports(f"expert_parallel.{op}", device="cuda", backend="cpu")
    answer = winnow.supports("expert_parallel.dispatch", device="cuda", hidden=7)
    assert "hidden: want rows of a multiple of 16 bytes, got 7" in answer.reason
    assert (
        "this GPU is not visible to the process"
        in winnow.supports("expert_parallel.combine", device="cuda:99").reason
    )


# ---- The layer of torch.


def test_one_process_is_a_world(alone):  # noqa: F811
    assert initialize_distributed(seed=4) == (0, 1)
    layer = ep.EPAll2AllLayer(None, 4, 8, 2, 0, 4, 1, 1, torch.float32, num_sm=3)
    assert layer.device == torch.device("cuda", 0) and layer._all_to_all.sm_count == 3
    tokens = torch.arange(24.0, device="cuda").view(3, 8)
    choice = torch.tensor([[3, 0], [4, 1], [-1, 4]]).int().cuda()
    output, weights, desc = layer.dispatch(tokens, choice)
    assert weights is None and torch.equal(output, tokens[[0, 1, 0]])
    assert torch.equal(desc.topk_indices_tensor, choice)
    combined = layer.combine(output, desc)
    assert torch.equal(combined, torch.stack([2 * tokens[0], tokens[1], 0 * tokens[2]]))
    assert layer.a2a_ctx.token_send_buf_rdma.device == layer.device
    layer.ep_barrier_all(torch.cuda.current_stream())
    layer.finalize()
    assert torch.equal(output, tokens[[0, 1, 0]])
    context = ep.DispatchCombineContext.create(layer.ep_config)
    assert context.signal_buf.is_cuda
    context.finalize()
    on_cpu = ep.EPAll2AllLayer(None, 4, 8, 2, 0, 4, 1, 1, torch.float32, device="cpu")
    assert torch.equal(on_cpu.dispatch(tokens.cpu(), choice.cpu())[0], output.cpu())
    on_cpu.finalize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_for_each_of_two_gpus(tmp_path):
    """The documented program and the checks of expert_program.py, over NVSHMEM."""
    example = tmp_path / "example.py"
    example.write_text(documented_program("torchrun")[0])
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
         "--nproc-per-node", "2",
         HERE / "expert_program.py", example, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "4", "WINNOW_TIMEOUT_SECONDS": "8"},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert output.count("combined: torch.Size([128, 7168]) on cuda") == 2, output
    survivor = (tmp_path / "0.json").read_text()
    assert '"checked": true' in survivor and '"code": "timeout"' in survivor, output
