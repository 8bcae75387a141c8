"""winnow.compat.deep_ep.Buffer between processes, against an oracle of deep_ep's results."""

import inspect

import deep_ep_faults as faults
import deep_ep_fuzz as fuzz
import deep_ep_programs as programs
import deep_ep_refusals as refusals
import pytest
import torch
from processes import forked, python
from winnow.compat import deep_ep
from winnow.compat.deep_ep import _agreement
from winnow.compat.deep_ep._checks import wrong_dispatch
from winnow.compat.deep_ep._entry import calling

from winnow import Error, compat

WORLDS, SOME, TWO = (1, 2, 3, 4, 6), (2, 3), (2,)
# {what is tested: (numbers of ranks, programs with their arguments, one after the other)}
PROGRAMS = {
    "layouts": (WORLDS, (programs.layouts,)),
    "by experts": (WORLDS, *((programs.by_experts, seed, 1) for seed in range(3))),
    "by experts, aligned": (WORLDS, *((programs.by_experts, seed, 8) for seed in range(3))),
    "by ranks": (WORLDS, (programs.by_ranks,)),
    "another map": (WORLDS, (programs.another_map,)),
    "float8": (WORLDS, (programs.float8,)),
    "worst case": (WORLDS, (programs.worst_case,)),
    "strange defaults": (WORLDS, (programs.strange_defaults,)),
    "events and streams": (SOME, (programs.events,)),
    "layers grow": ((2, 4), (programs.more_tokens,)),
    "mistakes are errors on every rank": (
        SOME, (refusals.by_token,), (refusals.by_expert,), (refusals.apart,),
    ),
    "mistakes in buffers": (SOME, (refusals.of_two_buffers,)),
    "mistakes in signatures": (SOME, (refusals.of_no_values,)),
    "ranks that wait in different places meet again": (
        TWO, (faults.briefly, refusals.__name__, "after_two_timeouts"),
        (faults.briefly, refusals.__name__, "of_a_constructor"),
        (faults.briefly, refusals.__name__, "of_a_call_left_out"),
    ),
    "hybrid rows by expert": (WORLDS, (programs.hybrid, None)),
    "hybrid rows by expert, padded": (WORLDS, (programs.hybrid, 8)),
    "hybrid layers grow": (SOME, (programs.hybrid_grows,)),
    "elastic": (WORLDS, (programs.elastic, False, True), (programs.elastic, False, False)),
    "elastic, expanded": (WORLDS, (programs.elastic, True, True), (programs.elastic, True, False)),
    "scales stand beside their rows": (
        SOME, (programs.elastic_scales, False), (programs.elastic_scales, True),
        (programs.hybrid_scales, None), (programs.hybrid_scales, 8),
    ),
    "the number of SMs is that of each call": (TWO, (programs.sms,)),
    "elastic streams and repeats": (
        SOME, (programs.elastic_streams,), (programs.elastic_epilogue,),
    ),
    "a token of too many ranks is refused": ((3, 4), (programs.many_ranks,)),
    "a rank that is late is named": (TWO, (programs.late,)),
    "several nodes": ((4,), (programs.nodes,)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "world"), [(what, world) for what, (of, *_) in PROGRAMS.items() for world in of]
)
def test_ranks(deep_ep_pool, what, world):
    for program in PROGRAMS[what][1:]:
        deep_ep_pool.run(world, *program)


def test_random_mistakes(deep_ep_pool):
    for outcomes in zip(*deep_ep_pool.run(2, fuzz.play, 1, 40), strict=True):
        assert not fuzz.wrong(outcomes), outcomes


# The parameters of a function in their order, without `self`.
SIGNATURES = {
    deep_ep.Buffer: """group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank
        allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm
        use_fabric""",
    deep_ep.Buffer.dispatch: """x handle num_tokens_per_rank num_tokens_per_rdma_rank
        is_token_in_rank num_tokens_per_expert topk_idx topk_weights expert_alignment
        num_worst_tokens config previous_event async_finish allocate_on_comm_stream""",
    deep_ep.Buffer.combine: """x handle topk_weights bias config previous_event async_finish
        allocate_on_comm_stream""",
    deep_ep.Buffer.get_dispatch_layout: """topk_idx num_experts previous_event async_finish
        allocate_on_comm_stream""",
    deep_ep.Buffer.low_latency_dispatch: """x topk_idx num_max_dispatch_tokens_per_rank num_experts
        cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale
        use_ue8m0 async_finish return_recv_hook""",
    deep_ep.Buffer.low_latency_combine: """x topk_idx topk_weights handle use_logfmt zero_copy
        async_finish return_recv_hook out combine_wait_recv_cost_stats overlap packed_recv_count
        comp_signal block_m threshold num_sms src_signals src_signal_expect_value""",
    deep_ep.ElasticBuffer: """group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk
        use_fp8_dispatch deterministic allow_hybrid_mode allow_multiple_reduction
        prefer_overlap_with_compute sl_idx num_allocated_qps num_cpu_timeout_secs
        num_gpu_timeout_secs explicitly_destroy""",
    deep_ep.ElasticBuffer.dispatch: """x topk_idx topk_weights cumulative_local_expert_recv_stats
        num_experts num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event
        previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream handle
        do_handle_copy do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf""",
    deep_ep.ElasticBuffer.combine: """x handle topk_weights bias num_sms num_qps previous_event
        previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream""",
    deep_ep.HybridEPBuffer.dispatch_with_permute: """hidden topk_idx topk_weights
        num_of_experts_per_rank num_of_experts use_fp8 routing_map probs scaling_factor
        num_permuted_tokens pad_multiple handle non_blocking fuse_permute_dispatch
        num_dispatched_tokens use_host_meta""",
    deep_ep.HybridEPBuffer.combine_with_unpermute: """hidden probs handle pad_multiple
        fuse_unpermute_combine num_dispatched_tokens""",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures_name_every_parameter(function):
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    assert names == SIGNATURES[function].split()


def test_layouts_of_any_strides():
    buffer = deep_ep.Buffer(Alone())
    idx = torch.tensor([[0, 3, -1], [2, 1, 5], [7, -1, -1]])
    want = buffer.get_dispatch_layout(idx, 8)
    wide = torch.full((3, 6), 4)
    wide[:, ::2] = idx
    for given in (idx.t().contiguous().t(), wide[:, ::2], idx.int().t().contiguous().t()):
        assert not given.is_contiguous()
        for one, other in zip(buffer.get_dispatch_layout(given, 8), want, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one, other)


class Alone:
    """A group of this process alone."""

    def rank(self):
        return 0

    def size(self):
        return 1


def test_what_is_not_here_is_refused_by_name():
    with pytest.raises(Error, match="enable_shrink: want False without low_latency_mode"):
        deep_ep.Buffer(Alone(), enable_shrink=True)
    buffer = deep_ep.Buffer(Alone())
    with pytest.raises(Error, match="without low_latency_mode"):
        buffer.low_latency_dispatch(torch.zeros(1, 8), None, 1, 8)
    with pytest.raises(TypeError, match="use_nvfp4"):
        buffer.dispatch(torch.zeros(1, 8), use_nvfp4=True)
    with pytest.raises(Error, match="without explicitly_destroy"):
        buffer.destroy()
    with pytest.raises(Error, match="new_num_sms: want an even number, got 7"):
        deep_ep.Buffer.set_num_sms(7)
    for wrong in (None, "text", torch.ones(3)):
        with pytest.raises(Error, match="num_experts: want an integer from 1 to"):
            buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), wrong)
    for kind, arguments in (
        (deep_ep.Buffer, ("text",)),
        (deep_ep.HybridEPBuffer, ("text", 256, 4, 4)),
        (deep_ep.ElasticBuffer, ("text",)),
    ):
        with pytest.raises(Error, match="group: want a process group of torch, got str"):
            kind(*arguments)


def test_config_is_for_any_number_of_ranks():
    for ranks in (2, 3, 6, 200):
        config = deep_ep.Buffer.get_dispatch_config(ranks)
        assert config.get_nvl_buffer_size_hint(14336, ranks) > 0
        hint = deep_ep.Buffer.get_combine_config(ranks).get_rdma_buffer_size_hint(14336, ranks)
        assert (hint > 0) == (ranks > 8)


def test_counts_beyond_32_bits_are_no_counts():
    rows, in_rank = torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.bool)
    counts = torch.tensor([1, 2**32 + 1])
    wrong = wrong_dispatch(1, None, rows, None, in_rank, counts, None, None)
    assert wrong == ("num_tokens_per_expert", "numbers of 32 bits", 2**32 + 1)
    assert wrong_dispatch(1, None, rows, None, in_rank, counts % 2, None, None) is None


@pytest.mark.parametrize("wrong", ["x", float("nan"), -1, None, 2.5])
def test_config_takes_whole_numbers(wrong):
    text = "^deep_ep.Config: num_sms: want a whole number, 0 or more, got "
    with pytest.raises(ValueError, match=text):
        deep_ep.Config(wrong)


def test_the_folder_has_a_real_package():
    path = python("-m", "winnow", "compat-path", check=True).stdout.strip()
    assert path == str(compat.path())
    program = "import deep_ep, deep_ep.utils as u; print(deep_ep.Buffer.__module__, u.EventHandle)"
    assert forked("-c", program, path=[path]).stdout.startswith("winnow.compat.deep_ep.buffer")


@pytest.mark.parametrize(
    "text",
    ["xx", "{}", "[]", b"\xff", "[" * 100_000, '{"late": 3}', '{"late": ["0", 1, 2]}',
     '{"late": [0, 1, 2, 3]}', '{"late": [2, 1, 0]}', '{"late": [0, 1, 0], "masked_by": 1}',
     '{"late": [0, "1", 0]}', '{"late": [1, NaN, 0]}', '{"late": [1, -5, 0]}',
     '{"late": [1, 1' + "0" * 400 + ", 0]}", r'{"of": {"call": "\ud800"}, "number": 1}',
     '{"masked_by": 2}', '{"masked_by": -1}', '{"masked_by": true}',
     '{"of": {}, "number": 1}', '{"of": {"call": 1}, "number": 1}',
     '{"of": {"call": "c"}, "number": "1"}', '{"of": {"call": "c"}, "number": -1}',
     *(f'{{"of": {{"call": "c"}}, "number": 1, {more}}}' for more in (
         '"masked": [2]', '"masked": 1', '"tokens": 1e9', '"tokens": 2147483648', '"topk": -1',
         '"before": null', '"place": ["host"]', '"notifiers": [1]', '"world": 1', '"refusal": []',
         '"unknown": 0')),
     '{"of": {"call": "c", "sizes": [1]}, "number": 1}',
     '{"of": {"call": "c", "sizes": {"hidden": [1]}}, "number": 1}'],
)  # fmt: skip
def test_what_no_rank_has_written_is_named(text):
    with calling("deep_ep.Buffer"), pytest.raises(Error, match="p/1 of the store holds"):
        _agreement._message("p/1", text, 2)


def test_a_group_without_a_store(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    group = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 2})()
    with pytest.raises(ValueError, match="deep_ep.Buffer: group: want a process group of torch"):
        deep_ep.Buffer(group)


def test_a_rank_says_something_of_all_that_is_read():
    mine = {"of": {"call": "deep_ep.Buffer"}, "number": 1, "before": 0}
    said = {key: mine[key] for key in ("of", "number")}
    with calling("deep_ep.Buffer"), pytest.raises(Error, match="rank 1 says nothing of before"):
        _agreement._compared(_agreement.Agreement("p", {0: mine, 1: said}, ()), mine)
