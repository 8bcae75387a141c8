"""The all-to-all on GPUs: streams, graphs, memory, errors; test_expert_parallel.py has rows and
sums on each device. Skipped without a GPU.

The ranks of a world are threads, each with a stream, on one GPU. A kernel must not be loaded, at
its first use, while another rank's waits for this one: a world of one rank goes first.
"""

import threading
from types import SimpleNamespace

import expert_oracle as oracle
import numpy as np
import pytest
import torch
import winnow.torch as ops
from expert_checks import check_rows
from expert_gpu import CONFIG, SLEEP, cuda, loaded, on_host, record  # noqa: F401
from expert_problems import payload, problem, routing
from kinds import gpu, numbers
from ranks import Ranks, new_stream, run_all, run_each

import winnow
from winnow import expert_parallel as ep
from winnow.expert_parallel import autograd

pytestmark = [*gpu, pytest.mark.usefixtures("loaded")]

# ---- Streams, graphs, memory.


def test_a_graph_replays_with_new_tokens_and_routings():
    """No host takes part in a call whose size is fixed; too many rows are the next call's error."""
    sizes = (5, 0, 8, 3)
    meet = threading.Barrier(4)

    def body(layer, rank):
        recorded = record(layer, [torch.zeros(n, 16) for n in sizes], 40)
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


# ---- Errors.


def test_a_mistake_of_one_rank_is_an_error_on_all():
    inputs, indices, _ = problem()

    def body(layer, rank):
        tokens, choice = cuda(inputs[rank]), cuda(indices[rank])
        wrong, copied, wide = rank == 2, numbers(tokens), cuda(indices[rank].astype(np.float64))
        for mistake, text in [
            ((torch.from_numpy(copied) if wrong else tokens, choice), "input: want device cuda:0"),
            ((tokens, wide if wrong else choice), "expert_indices: want dtype i32 or i64"),
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
        assert "rank 1" in error.message


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
        assert answer.backend == "cuda", answer
        assert not winnow.supports(f"expert_parallel.{op}", device="cuda", backend="cpu")
    answer = winnow.supports("expert_parallel.dispatch", device="cuda", hidden=7)
    assert "hidden: want rows of a multiple of 16 bytes, got 28 bytes, 7 of f32" in answer.reason
    assert (
        "this GPU is not visible to the process"
        in winnow.supports("expert_parallel.combine", device="cuda:99").reason
    )
