"""Calls of the all-to-all that go wrong: what each rank hears of it."""

import re
import time

import numpy as np
import pytest
import torch
from expert_problems import SMALL, payload
from ranks import Ranks, all_refuse, run_all, run_each
from winnow.compat.deep_ep._route import int32_indices

import winnow
from winnow import expert_parallel as ep
from winnow.expert_parallel import autograd


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.complex64])
def test_scales_of_a_dtype_without_a_known_size(dtype):
    """They are opaque, but their bytes are counted: a bool once divided by zero."""
    x, scales = torch.zeros(4, 16).to(torch.float8_e4m3fn), torch.ones(4, 4, dtype=dtype)
    i = np.zeros((4, 3), np.int32)
    with Ranks(2, **SMALL) as ranks:
        body = lambda layer, rank: layer.dispatch(x, torch.from_numpy(i), scales=scales)  # noqa: E731
        all_refuse(ranks.try_run(body), "rank 0: scales: want dtype f32 or i32 or u8")


ROWS, EXPERTS = payload(0, 4), np.zeros((4, 3), np.int32)


def _dispatch(layer, **given):
    return layer.dispatch(**{"input": ROWS, "expert_indices": EXPERTS, **given})


def _recorded_dispatch(layer, **given):
    right = {"input": torch.from_numpy(ROWS), "expert_indices": torch.from_numpy(EXPERTS)}
    return autograd.dispatch(layer, **{**right, **given})


def _combine(layer, descriptor=lambda got: got.descriptor, **given):
    got = _dispatch(layer)
    descriptor = descriptor and descriptor(got)
    return layer.combine(**{"expert_output": got.output, "descriptor": descriptor, **given})


def _recorded_combine(layer, **given):
    rows, _, descriptor = _recorded_dispatch(layer)
    return autograd.combine(layer, **{"expert_output": rows, "descriptor": descriptor, **given})


@pytest.mark.parametrize(("name", "value"), [("expert_alignment", 2), ("scatter_indices", EXPERTS)])
def test_what_differs_is_data_too(name, value):
    with Ranks(2, **SMALL) as ranks:
        for error in ranks.try_run(
            lambda layer, rank: _dispatch(layer, **({name: value} if rank else {}))
        ):
            assert (error.reason, error.differing) == ("arguments_differ", name)
            assert (error.argument, error.wanted, error.got) == ("", "", "")


# What the library finds wrong itself, all_to_all_refusals_test.cc has.
MISTAKES = [
    (_dispatch, {"input": ROWS.astype(float)}, "input: want dtype f32.*got f64"),
    (_dispatch, {"input": [1.0]}, "input: .*got list"),
    (_dispatch, {"input": torch.ones(4, 16, requires_grad=True)}, "input: .*no gradient"),
    (_dispatch, {"order": "sideways"}, "order: want expert_major"),
    (_dispatch, {"order": None}, "order: want expert_major or token_major, got None"),
    (_dispatch, {"order": 3}, "order: want expert_major or token_major, got 3"),
    (_dispatch, {"expert_alignment": "4"}, "expert_alignment: want an integer of 64 bits, got '4'"),
    (
        _dispatch,
        {"expert_alignment": 2**70},
        "expert_alignment: want an integer of 64 bits, got 11",
    ),
    (_dispatch, {"worst_case_rows": 1.5}, "worst_case_rows: want an integer of 64 bits, got 1.5"),
    (_dispatch, {"copy_out": 1}, "copy_out: want True or False, got 1"),
    (_dispatch, {"cached": (1, 2)}, "cached: want a Descriptor, got tuple"),
    (_dispatch, {"stream": "x"}, "stream: want None, a handle, or an object with .*, got 'x'"),
    (_combine, {"descriptor": None}, "descriptor: want a Descriptor, got None"),
    (
        _combine,
        {"descriptor": lambda got: got},
        "descriptor: want a Descriptor, got Dispatched, whose .descriptor is one",
    ),
    (_combine, {"weighted": 1}, "weighted: want True or False, got 1"),
    (_combine, {"stream": "x"}, "stream: want None, a handle"),
    *(
        (_recorded_dispatch, {option: 7}, f"{option}: want none with gradients, got one$")
        for option in ("out", "scales", "stream")
    ),
    (_recorded_dispatch, {"input": ROWS}, "input: want a tensor of torch, got ndarray$"),
    (_recorded_dispatch, {"input": [1.0]}, "input: want a tensor of torch, got list$"),
    (_recorded_dispatch, {"weights": ROWS}, "weights: want a tensor of torch, got ndarray$"),
    (_recorded_dispatch, {"order": None}, "order: want expert_major or token_major, got None$"),
    (_recorded_dispatch, {"copy_out": 1}, "copy_out: want True or False, got 1$"),
    (_recorded_dispatch, {"cached": "last"}, "cached: want a Descriptor, got 'last'$"),
    (_recorded_combine, {"descriptor": None}, "descriptor: want a Descriptor, got None$"),
]


@pytest.mark.parametrize(("call", "change", "text"), MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(call, change, text):
    operation = call.__name__.rpartition("_")[2]
    with Ranks(2, **SMALL) as ranks:
        outcomes = ranks.try_run(lambda layer, rank: call(layer, **(change if rank else {})))
        all_refuse(outcomes, f"^expert_parallel::{operation}: rank 1: {text}")
        ranks.run(lambda layer, rank: call(layer))  # it works on


def test_rows_of_a_framework_without_the_dtype_of_the_layer_are_what_is_wrong():
    x, i = torch.ones(4, 16, dtype=torch.bfloat16), torch.zeros(4, 3).int()
    with Ranks(1, **{**SMALL, "dtype": "bfloat16"}) as ranks:
        layer = ranks.layers[0]
        got = layer.dispatch(x, i)
        rows = np.ones((12, 16), np.float32)
        with pytest.raises(ValueError, match="combine: .*expert_output: want dtype bf16, got f32"):
            layer.combine(rows, got.descriptor)
        with pytest.raises(ValueError, match="dispatch: .*input: want dtype bf16 .*, got f32"):
            layer.dispatch(rows[:4], i.numpy())


def test_a_keyword_that_there_is_not_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)
    with Ranks(2, **SMALL) as ranks:
        for call in ("dispatch", "combine"):

            def body(layer, rank, call=call):
                given = (x, i)
                if call == "combine":
                    got = layer.dispatch(x, i)
                    given = got.output, got.descriptor
                return getattr(layer, call)(*given, **({"wieghted": True} if rank else {}))

            other, own = ranks.try_run(body)
            assert isinstance(own, TypeError) and f"{call}() got an unexpected" in str(own), own
            assert isinstance(other, ValueError) and f"rank 1: {own}" in str(other), other
        ranks.run(lambda layer, rank: layer.dispatch(x, i))


def test_all_ranks_hear_of_a_wrong_low_latency_call():
    """And the one after it is the same call on all of them."""
    world = ep.InProcessWorld(2)
    sizes = {"max_tokens": 4, "hidden": 128, "topk": 1, "experts": 4, "timeout": 20}
    layers = run_all(2, lambda r: ep.LowLatency(world.transport(r), world.store(), **sizes))
    x, i = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0], [3]])
    w = torch.ones(2, 1)
    made = run_all(2, lambda r: layers[r].dispatch(x, i, format="bfloat16"))
    dispatches = [
        ((x, i), {"foo": 1}, TypeError, r"dispatch\(\) got an unexpected"),
        ((x, i, "fp8"), {}, TypeError, r"dispatch\(\) takes at most 2 positional"),
        ((x,), {}, ValueError, "expert_indices: want "),
        ((x, i), {"format": "fp8", "out": made[1]}, ValueError, "format: want that of out, got"),
    ]
    combines = [
        ((None, i, w), {}, ValueError, "dispatched: want the result of dispatch"),
        ((made[1], i), {}, ValueError, "weights: want "),
    ]

    def dispatch(rank, *arguments, **options):
        return layers[rank].dispatch(*arguments, **{"format": "bfloat16", **options})

    def combine(rank, *arguments, **options):
        return layers[rank].combine(made[rank].output, *arguments, **options)

    def check(call, good, arguments, options, error, text):
        body = lambda r: call(r, *arguments, **options) if r else call(r, *good(r))  # noqa: E731
        other, own = run_each(2, body)
        assert isinstance(own, error) and re.search(text, str(own)), own
        assert isinstance(other, ValueError) and re.search(text, str(other)), other
        run_all(2, lambda r: call(r, *good(r)))

    for case in dispatches:
        check(dispatch, lambda r: (x, i), *case)
    for case in combines:
        check(combine, lambda r: (made[r], i, w), *case)


def test_a_low_latency_call_that_only_receives_can_be_made_again():
    world = ep.InProcessWorld(1)
    layer = ep.LowLatency(
        world.transport(0), world.store(), max_tokens=4, hidden=128, topk=1, experts=2
    )
    x, i = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0], [1]])
    sent = layer.dispatch(x, i, format="bfloat16", part="send")
    for options, text in (({"out": 3}, "out: want "), ({"out": sent, "to": 1}, "unexpected")):
        with pytest.raises((ValueError, TypeError), match=text):
            layer.dispatch(part="receive", **options)
    got = layer.dispatch(part="receive", out=sent)
    sent = layer.combine(got.output, got, i, torch.ones(2, 1), part="send")
    for indices, out, text in ((i, x, "out: want a LowLatencyCombining"), (i + 8, sent, "-1 to")):
        with pytest.raises(ValueError, match=text):
            layer.combine(None, got, indices, torch.ones(2, 1), part="receive", out=out)
    out = layer.combine(None, got, i, torch.ones(2, 1), part="receive", out=sent)
    assert torch.equal(out, x)


def test_a_combine_of_what_is_only_sent_is_refused_on_all():
    """Its rows are not there; a whole dispatch into the same tensors is another call."""
    world = ep.InProcessWorld(2)
    sizes = {"max_tokens": 4, "hidden": 128, "topk": 1, "experts": 2, "timeout": 20}
    layers = run_all(2, lambda r: ep.LowLatency(world.transport(r), world.store(), **sizes))
    x, i, w = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0], [1]]), torch.ones(2, 1)
    out = [torch.full((2, 128), 7, dtype=torch.bfloat16) for _ in layers]
    whole = run_all(2, lambda r: layers[r].dispatch(x, i, format="bfloat16"))
    sent = run_all(2, lambda r: layers[r].dispatch(x, i, part="send", out=whole[r]))

    def combine(rank, of, part="both"):
        return layers[rank].combine(of[rank].output, of[rank], i, w, part=part, out=out[rank])

    for part in ("both", "send"):
        outcomes = run_each(2, lambda r, part=part: combine(r, *((sent, part) if r else (whole,))))
        for outcome in outcomes:
            assert isinstance(outcome, winnow.InvalidArgument), outcome
            assert outcome.argument == "dispatched"
            assert "want a dispatch that was received, got one that was only sent" in str(outcome)
            assert all((one == 7).all() for one in out)
    run_all(2, lambda r: combine(r, whole))
    run_all(2, lambda r: layers[r].dispatch(part="receive", out=sent[r]))
    for sums in run_all(2, lambda r: combine(r, sent)):
        assert torch.equal(sums, x)


def test_a_barrier_of_which_an_option_is_wrong_lets_the_others_pass():
    with Ranks(2, **SMALL) as ranks:
        for options in ({"stream": "x"}, {"intra_node_only": 1}):
            other, own = ranks.try_run(
                lambda layer, rank, options=options: layer.barrier(**(options if rank else {}))
            )
            assert other is None, other
            assert isinstance(own, ValueError) and f"barrier: {next(iter(options))}" in str(own)
        ranks.run(lambda layer, rank: layer.barrier())


@pytest.mark.parametrize(
    ("change", "text", "other"),
    [
        ({"topk": "3"}, "topk: want an integer of 32 bits, got '3'", "topk"),
        ({"topk": 2**32 + 2}, "topk: want an integer of 32 bits, got 4294967298", "topk"),
        ({"experts": None}, "experts: want an integer of 32 bits, got None", "experts"),
        ({"sm_count": "all"}, "sm_count: want an integer of 32 bits, got 'all'", "max_tokens"),
        ({"enable_local_combine": 1}, "enable_local_combine: want True or False", "max_tokens"),
        ({"dtype": "complex64"}, "dtype: want one of f32, f16, bf16, got complex64", "max_tokens"),
        ({"timeout": "soon"}, "timeout: want 0 seconds to a year, got 'soon'", "max_tokens"),
    ],
)
def test_a_size_of_the_wrong_type_is_an_error_on_all(change, text, other):
    world = ep.InProcessWorld(2)
    transports = [world.transport(rank) for rank in range(2)]

    def make(rank):
        config = {**SMALL, "timeout": 30, **(change if rank else {})}
        return ep.AllToAll(transports[rank], world.store(), **config)

    outcomes = run_each(2, make)
    assert all(isinstance(outcome, ValueError) for outcome in outcomes), outcomes
    assert str(outcomes[1]).startswith(f"expert_parallel::AllToAll: {text}")
    assert f"{other}: want the same on every rank" in str(outcomes[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "complex64"}, "AllToAll: dtype: want one of f32, f16, bf16, got complex64"),
        ({"dtype": "float64"}, "dtype: want f32, f16 or bf16, got f64"),
        ({"weight_dtype": float}, "AllToAll: weight_dtype: want one of f32, f16, bf16, got float"),
        ({"dtype": np.int32}, "dtype: want f32, f16 or bf16, got i32"),
        (
            {"hidden": 250, "dtype": "bfloat16"},
            "hidden: want rows of a multiple of 16 bytes, got 500 bytes, 250 of bf16$",
        ),
        ({"timeout": -1.0}, "timeout: want 0 seconds to a year"),
        ({"timeout": float("nan")}, "timeout: want 0 seconds to a year, got nan"),
    ],
)
def test_settings_that_are_excluded(change, text):
    """Others, all_to_all_config_test.cc has."""
    world = ep.InProcessWorld(1)
    transport = world.transport(0)
    with pytest.raises(ValueError, match=text) as caught:
        ep.AllToAll(transport, world.store(), **{**SMALL, **change})
    assert caught.value.operation == "expert_parallel::AllToAll"


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu:0")])
def test_the_cpu_has_two_names(device):
    with Ranks(1, **SMALL, device=device) as ranks:
        assert ranks.layers[0].device == "cpu"
    assert winnow.supports("sparse_mla.forward", device=device)


def test_closed_and_foreign():
    with Ranks(1, **SMALL) as one, Ranks(1, **SMALL) as other:
        layer, x, i = one.layers[0], payload(0, 2), np.zeros((2, 3), np.int32)
        got = layer.dispatch(x, i)
        with pytest.raises(ValueError, match="descriptor: want one of this layer"):
            other.layers[0].combine_buffer(got.descriptor)
        layer.close()
        layer.close()
        assert layer.arena_bytes == 0
        with pytest.raises(ValueError, match="the layer is closed"):
            layer.combine_buffer(got.descriptor)


def test_an_out_that_is_too_small_is_an_error_on_all():
    x, i = payload(0, 4), np.zeros((4, 3), np.int32)  # 24 rows to rank 0
    with Ranks(2, **SMALL) as ranks:

        def body(layer, rank, rows=24):
            return layer.dispatch(x, i, out=np.empty((0 if rank else rows, 16), np.float32))

        assert [len(got.output) for got in ranks.run(body)] == [24, 0]
        small = ranks.try_run(lambda layer, rank: body(layer, rank, 23))
        all_refuse(small, "out: want 24 rows or more on rank 0, got 23")
        for bad, text in (
            (np.empty((24, 16)), "out: want dtype f32, got f64"),
            (np.broadcast_to(np.float32(0), (24, 16)), "read-only"),
        ):
            outcomes = ranks.try_run(
                lambda layer, rank, bad=bad: layer.dispatch(x, i, out=bad if rank == 1 else None)
            )
            all_refuse(outcomes[:1], "")
            all_refuse(outcomes[1:], text)
        ranks.run(body)


@pytest.mark.parametrize("value", [2**32, 2**31, -(2**40), -(2**63)])
def test_an_index_beyond_32_bits_is_named_as_it_was_given(value):
    indices = np.array([[1], [value]])
    with Ranks(1, **{**SMALL, "topk": 1, "experts": 4}) as ranks:
        text = f"expert_indices: want -1 to 4, got {value} for token 1$"
        with pytest.raises(ValueError, match=text):
            ranks.layers[0].dispatch(np.zeros((2, 16), np.float32), indices)
    text = f"topk_idx: want -1 to 4 .*, got {value} for token 1, k 0$"
    with pytest.raises(ValueError, match=text):
        int32_indices(torch.from_numpy(indices), 4)
    below = torch.tensor([[-100]])
    assert int32_indices(below, 4).item() == -100  # which layout() names


def test_timeouts_of_no_time_end_at_once(monkeypatch):
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "60")
    begin = time.monotonic()
    with pytest.raises(winnow.Error, match="rank 1"):
        ep.create_shared_memory(ep.MemoryStore(), 0, 2, timeout=0)
    assert time.monotonic() - begin < 20


def test_the_sums_of_combine_share_no_memory_with_weights():
    with Ranks(1, **{**SMALL, "topk": 1}) as ranks:
        (layer,) = ranks.layers
        got = layer.dispatch(np.ones((2, 16), np.float32), np.array([[1], [2]]))
        out = np.zeros((2, 16), np.float32)
        weights = out.reshape(-1)[:2].reshape(2, 1)
        with pytest.raises(ValueError, match="out: want memory apart from weights"):
            layer.combine(got.output, got.descriptor, weights=weights, out=out)


def test_a_prefix_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="prefix: want at most 64 bytes, got 300 bytes"):
        ep.create_shared_memory(ep.MemoryStore(), 0, 1, prefix="x" * 300)
