"""The all-to-all between threads: rows, tables, sums and options, bit for bit."""

from types import SimpleNamespace

import expert_oracle as oracle
import numpy as np
import pytest
import torch
from expert_checks import check_float8_rows, check_rows, check_tables
from expert_gpu import CONFIG, cuda, loaded, on_host  # noqa: F401
from expert_problems import SMALL, float8_problem, payload, problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds import gpu, numbers
from layouts import layouts
from ranks import Ranks


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def at(request):
    """Where a test runs: what makes an array (of numpy on the CPU) or a tensor there, and ranks."""
    on_gpu = request.param == "cuda"
    if on_gpu:
        request.getfixturevalue("loaded")
    return SimpleNamespace(
        device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        array=cuda if on_gpu else np.array,
        tensor=cuda if on_gpu else lambda a, dtype=None: torch.from_numpy(np.array(a)).to(dtype),
        ranks=lambda **options: Ranks(4, **{**(CONFIG if on_gpu else SMALL), **options}),
    )


@pytest.mark.parametrize("local", [4, 2, 1])
@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_major_rows_come_in_the_documented_order(local, alignment, at):
    inputs, indices, weights = problem()
    rows, counts, offsets = oracle.expert_rows(indices, 8, 4, alignment)

    def body(layer, rank):
        assert torch.device(layer.device) == at.device
        got = layer.dispatch(
            at.array(inputs[rank]), at.array(indices[rank]), weights=at.array(weights[rank]),
            expert_alignment=alignment,
        )  # fmt: skip
        for made in (got.output, got.weights, got.descriptor.expert_offsets):
            assert type(made) is np.ndarray or made.device == at.device
        described = on_host(got.descriptor)
        check_rows(on_host(got), rows[rank], inputs, weights)
        assert described.rows == described.wanted_rows == len(rows[rank])
        assert described.expert_counts.tolist() == counts[rank]
        assert described.expert_offsets.tolist() == offsets[rank]
        assert (described.host_expert_counts, described.host_expert_offsets) == (
            counts[rank], offsets[rank],
        )  # fmt: skip
        assert described.num_dispatch_token_cur_rank == len(inputs[rank])
        assert described.num_input_tokens_per_rank.tolist() == [5, 0, 8, 3]
        assert described.order == "expert_major" and described.has_weights
        assert described.expert_alignment == alignment and described.worst_case_rows == 0
        assert got.expert_ids is None and got.scales is None and described.source_begins is None
        check_tables(described, rows, indices, rank, local)

    with at.ranks(local_world_size=local) as ranks:
        ranks.run(body)


def test_token_major_rows_carry_each_token_once(at):
    inputs, indices, weights = problem(seed=1)
    rows = oracle.token_rows(indices, 8, 4)
    sums = oracle.combine(indices, 8, 4, 2, lambda rank, token, k: inputs[rank][token], hidden=16)

    def body(layer, rank):
        got = layer.dispatch(
            at.array(inputs[rank]), at.array(indices[rank]), weights=at.array(weights[rank]),
            order="token_major",
        )  # fmt: skip
        here = on_host(got)
        assert here.output.shape[0] == len(rows[rank]) and got.descriptor.order == "token_major"
        begins = [sum(source < other for source, _, _ in rows[rank]) for other in range(5)]
        assert on_host(got.descriptor).source_begins.tolist() == begins
        for row, (source, token, experts) in enumerate(rows[rank]):
            np.testing.assert_array_equal(here.output[row], inputs[source][token])
            assert here.expert_ids[row].tolist() == experts
            kept = np.where(np.array(experts) >= 0, weights[source][token], 0)
            np.testing.assert_array_equal(here.weights[row], kept)
        # Each rank gives the sum over its experts.
        pairs = (here.expert_ids >= 0).sum(1, keepdims=True).astype(np.float32)
        out = numbers(layer.combine(at.array(here.output * pairs), got.descriptor))
        np.testing.assert_allclose(out, sums[rank], rtol=1e-6)

    with at.ranks(local_world_size=2) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("local", [4, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("local_combine", [False, True])
def test_combine_rounds_where_the_contract_says(local, dtype, local_combine, at):
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
        tokens = at.tensor(np.zeros((len(indices[rank]), 16), np.float32), typed)
        got = layer.dispatch(tokens, at.tensor(indices[rank]), weights=at.tensor(weights[rank]))
        outputs = [expert_row[pair] for pair in rows[rank]] or np.zeros((0, 16), np.float32)
        outputs = at.tensor(np.array(outputs, np.float32), typed)
        out = layer.combine(outputs, got.descriptor)
        assert (type(out), out.dtype, out.device) == (torch.Tensor, typed, at.device)
        buffer = layer.combine_buffer(got.descriptor)
        buffer.copy_(outputs)
        given = at.tensor(np.full(tokens.shape, 7, np.float32), typed)
        back = layer.combine(
            buffer, got.descriptor, weighted=True, out=given, bias=at.tensor(bias[rank], typed)
        )
        assert back is given
        np.testing.assert_array_equal(numbers(out), plain[rank])
        np.testing.assert_array_equal(numbers(given), weighted[rank])

    config = {"dtype": typed, "local_world_size": local}
    with at.ranks(**config, enable_local_combine=local_combine) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("whole", [True, False])
def test_scatter_indices_place_the_rows(whole, at):
    inputs, indices, weights = problem(seed=3)
    rng = np.random.default_rng(9)
    table, rows = oracle.scatter_table(indices, 8, 4, lambda pairs: rng.permutation(pairs).tolist())
    rows = [[tuple(pair) for pair in mine] for mine in rows]
    ends = np.cumsum([0, 5, 0, 8, 3])

    def body(layer, rank):
        mine = table if whole else table[ends[rank] : ends[rank + 1]]
        got = layer.dispatch(
            at.array(inputs[rank]), at.array(indices[rank]), weights=at.array(weights[rank]),
            scatter_indices=at.array(mine),
        )  # fmt: skip
        check_rows(on_host(got), rows[rank], inputs, weights)
        again = layer.dispatch(at.array(inputs[rank]), cached=got.descriptor)
        check_rows(on_host(again), rows[rank], inputs)

    with at.ranks(local_world_size=2) as ranks:
        ranks.run(body)


def test_float8_tokens_travel_with_their_scales(at):
    indices, bytes_of, scales = float8_problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]

    def body(layer, rank):
        got = layer.dispatch(
            at.tensor(bytes_of[rank]).view(torch.float8_e4m3fn), at.tensor(indices[rank]),
            scales=at.tensor(scales[rank]),
        )  # fmt: skip
        assert got.output.dtype == torch.float8_e4m3fn
        octets, factors = numbers(got.output.view(torch.uint8)), numbers(got.scales)
        check_float8_rows(octets, factors, rows[rank], bytes_of, scales)

    with at.ranks(hidden=144, dtype="bfloat16", local_world_size=2) as ranks:
        ranks.run(body)


def test_a_cached_dispatch_repeats_the_routing(at):
    inputs, indices, weights = problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]
    other = [values + 0.5 for values in inputs]

    def body(layer, rank):
        routing = at.tensor(indices[rank])
        first = layer.dispatch(at.tensor(inputs[rank]), routing)
        if routing.is_cuda:
            torch.cuda.current_stream().synchronize()
        routing.copy_(torch.zeros(routing.shape, dtype=routing.dtype))  # the descriptor has its own
        again = layer.dispatch(
            at.tensor(other[rank]), weights=at.tensor(weights[rank]), cached=first.descriptor
        )
        check_rows(on_host(first), rows[rank], inputs)
        check_rows(on_host(again), rows[rank], other, weights)
        assert first.weights is None and again.descriptor.has_weights

    with at.ranks(local_world_size=2) as ranks:
        ranks.run(body)


def test_worst_case_rows_fix_the_size_and_report_overflow():
    inputs, indices, weights = problem()
    rows = oracle.expert_rows(indices, 8, 4)[0]
    most = max(map(len, rows))

    def body(layer, rank):
        enough = most + 2
        got = layer.dispatch(
            inputs[rank], indices[rank], weights=weights[rank], worst_case_rows=enough
        )
        assert got.output.shape[0] == enough == got.descriptor.rows
        count = got.descriptor.wanted_rows
        assert count == len(rows[rank])
        np.testing.assert_array_equal(
            got.output[:count], [inputs[s][t] for s, t, _ in rows[rank]] or np.zeros((0, 16))
        )
        assert (got.weights[count:] == 0).all()
        less = layer.dispatch(inputs[rank], indices[rank], worst_case_rows=most - 1)
        assert less.descriptor.rows == most - 1
        with pytest.raises(
            ValueError, match=f"worst_case_rows: want {most} or more, got {most - 1}"
        ):
            layer.barrier()
        layer.barrier()

    with Ranks(4, **SMALL) as ranks:
        ranks.run(body)


class RoutedProblem:
    """What hypothesis prints of a failing example must be readable."""

    def __init__(self, world, local, experts, alignment, kind, given):
        self.world, self.local, self.experts, self.alignment = world, local, experts, alignment
        self.kind, self.given = kind, given

    def arrays(self, name):
        return [rank[name] for rank in self.given]

    def __repr__(self):
        tables = [table.tolist() for table in self.arrays("indices")]
        memory = [{name: (a.shape, a.strides) for name, a in rank.items()} for rank in self.given]
        return (
            f"world {self.world}, local {self.local}, experts {self.experts}, "
            f"alignment {self.alignment}, indices {tables}, {self.kind}, {memory}"
        )


@st.composite
def worlds(draw):
    world = draw(st.sampled_from([1, 2, 4]))
    local = draw(st.sampled_from([n for n in (1, 2, 4) if world % n == 0]))
    topk, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = world * per_rank
    expert = st.integers(-1, experts)
    if draw(st.booleans()):
        expert = st.just(draw(expert))  # all to one
    tables = [
        np.array(
            draw(st.lists(st.lists(expert, min_size=topk, max_size=topk), max_size=5)), np.int32
        ).reshape(-1, topk)
        for _ in range(world)
    ]
    kind, backwards = draw(st.sampled_from([(np.asarray, True), (torch.from_numpy, False)]))

    def laid_out(array, repeats=True):
        return draw(layouts(array, backwards, repeats))

    given = [
        {
            "input": laid_out(payload(rank, len(table))),
            "indices": laid_out(table),
            "weights": laid_out(np.arange(table.size, dtype=np.float32).reshape(table.shape)),
            "bias": laid_out(payload(7, len(table))),
            "sums": laid_out(payload(0, len(table)), repeats=False),
            # What the experts give: at least as many rows as can arrive.
            "rows": laid_out(payload(0, world * (5 * topk + 8 * per_rank)), repeats=False),
        }
        for rank, table in enumerate(tables)
    ]
    return RoutedProblem(world, local, experts, draw(st.sampled_from([1, 1, 8])), kind, given)


@settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(worlds())
def test_random_routings_agree_with_the_oracle(problem):
    world, experts, alignment = problem.world, problem.experts, problem.alignment
    inputs, indices, weights, bias = map(problem.arrays, ("input", "indices", "weights", "bias"))
    rows, _, offsets = oracle.expert_rows(indices, experts, world, alignment)
    sums = oracle.combine(
        indices, experts, world, problem.local,
        lambda rank, token, k: np.float32(k + 1) * inputs[rank][token], hidden=16,
        weights=weights, bias=bias,
    )  # fmt: skip

    def body(layer, rank):
        given = {name: problem.kind(array) for name, array in problem.given[rank].items()}
        got = layer.dispatch(
            given["input"], given["indices"], weights=given["weights"], expert_alignment=alignment
        )
        check_rows(got, rows[rank], inputs, weights)
        assert got.descriptor.expert_offsets.tolist() == offsets[rank]
        for row, pair in enumerate(rows[rank]):
            if pair is not None:
                got.output[row] *= np.float32(pair[2] + 1)
        # The output is overwritten in place and read where it lies, or copied from where it is not.
        options = {"weighted": True, "bias": given["bias"]}
        out = layer.combine(got.output, got.descriptor, **options)
        np.testing.assert_array_equal(out, sums[rank])
        elsewhere = given["rows"][: len(rows[rank])]
        elsewhere[:] = got.output
        layer.combine(elsewhere, got.descriptor, out=given["sums"], **options)
        np.testing.assert_array_equal(given["sums"], sums[rank])

    topk = indices[0].shape[1]
    config = {"max_tokens": 5, "hidden": 16, "topk": topk, "experts": experts, "dtype": "float32"}
    with Ranks(world, **config, local_world_size=problem.local) as ranks:
        ranks.run(body)
