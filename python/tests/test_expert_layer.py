"""EPAll2AllLayer under torchrun: expert_program.py does the checks, these look at what it left."""

import dataclasses
import gc
import inspect
import json
import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expert_launch import HERE, alone, documented_program  # noqa: F401
from processes import python
from ranks import torchrun
from winnow.distributed import finalize_distributed, initialize_distributed

import winnow
from winnow.expert_parallel import (
    BarrierAllContext,
    DispatchCombineContext,
    EPAll2AllLayer,
    EPConfig,
    barrier_all_on_stream,
    context,
    rendezvous,
)

RANKS = 4


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The reports of four ranks, the last of which ended in the middle, and torchrun's output."""
    folder = tmp_path_factory.mktemp("torchrun")
    example = folder / "example.py"
    example.write_text(documented_program("torchrun")[0])
    command = HERE / "expert_program.py", example, folder
    result = torchrun(RANKS, *command, add={"WINNOW_TIMEOUT_SECONDS": "20"})
    output = result.stdout + result.stderr
    reports = []
    for rank in range(RANKS):
        report = folder / f"{rank}.json"
        assert report.exists(), output
        reports.append(json.loads(report.read_text()))
    return reports, output


def test_the_documented_program_runs(launched):
    _, output = launched
    assert output.count("combined: torch.Size([128, 7168]) on cpu") == RANKS, output


def test_four_ranks_as_one_node_and_as_two(launched):
    reports, output = launched
    assert [report["rank"] for report in reports] == list(range(RANKS))
    assert all(report["checked"] for report in reports), output


def test_the_death_of_a_rank_is_an_error_on_the_others(launched):
    reports, _ = launched
    assert "death" not in reports[3]
    for report in reports[:3]:
        assert report["death"]["code"] == "timeout"
        assert re.search(
            r"expert_parallel::combine: rank \d waited .* of rank 3 .*: process \d+, gone",
            report["death"]["text"],
        )
        assert report["death"]["seconds"] < 20


_NEEDED = inspect.Parameter.empty
SIGNATURES = [
    (
        EPAll2AllLayer.__init__,
        {
            "ep_group": _NEEDED, "max_tokens": _NEEDED, "hidden": _NEEDED, "topk": _NEEDED,
            "rank": _NEEDED, "num_tot_experts": _NEEDED, "local_world_size": _NEEDED,
            "world_size": _NEEDED, "dtype": torch.bfloat16, "weight_dtype": torch.float32,
            "num_sm": 20, "enable_local_combine": False, "use_aot": False,
        },
    ),
    (
        EPAll2AllLayer.dispatch,
        {"input": _NEEDED, "exp_indices": _NEEDED, "weight": None, "full_scatter_indices": None},
    ),
    (EPAll2AllLayer.combine, {"input": _NEEDED, "ep_a2a_layout_desc": _NEEDED}),
    (EPAll2AllLayer.ep_barrier_all, {"stream": None, "intra_node_only": False}),
    (EPAll2AllLayer.finalize, {}),
    (DispatchCombineContext.create, {"ep_config": _NEEDED, "capacity": 2}),
    (
        DispatchCombineContext.reallocate_dispatch_output_buf,
        {"dispatch_recv_tokens": _NEEDED},
    ),
    (DispatchCombineContext.finalize, {}),
    (barrier_all_on_stream, {"ctx": _NEEDED, "stream": None}),
    (initialize_distributed, {"seed": None, "initialize_shmem": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "want"), SIGNATURES, ids=[f.__qualname__ for f, _ in SIGNATURES]
)
def test_arguments_are_those_of_the_original(function, want):
    """Names, order and defaults; what is added goes by keyword and may be left out."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in named)
    assert [(p.name, p.default) for p in named] == list(want.items())
    added = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is None for p in added)


def test_the_configuration_is_that_of_the_original():
    assert [(f.name, f.default) for f in dataclasses.fields(EPConfig)] == [
        (name, dataclasses.MISSING)
        for name in (
            "max_tokens hidden topk num_experts rank world_size local_world_size token_dtype "
            "weight_dtype offset_dtype"
        ).split()
    ]
    assert isinstance(inspect.getattr_static(DispatchCombineContext, "create"), staticmethod)
    assert next(iter(inspect.signature(BarrierAllContext).parameters)) == "is_intra_node"


def test_initialize_distributed_seeds_everything(alone):  # noqa: F811
    random_state, numpy_state = random.getstate(), np.random.get_state()
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for given, seed in ((4, 7), (None, 3)):  # the rank is 0
            assert initialize_distributed(seed=given) == (0, 1)
            drawn = random.random(), np.random.random(), torch.rand(3)
            assert drawn[0] == random.Random(seed).random()
            assert drawn[1] == np.random.RandomState(seed).random()
            assert torch.equal(
                drawn[2], torch.rand(3, generator=torch.Generator().manual_seed(seed))
            )
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def _config(world=1, **sizes):
    sizes = {"max_tokens": 4, "hidden": 8, "topk": 3, "num_experts": 4, **sizes}
    dtypes = torch.float32, torch.float32, torch.int32
    return EPConfig(*sizes.values(), 0, world, world, *dtypes)


def test_a_timeout_is_that_of_the_meeting_and_of_the_layer(alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rendezvous, "default_device", lambda: torch.device("cpu"))
    initialize_distributed()
    layer = EPAll2AllLayer(None, 4, 8, 3, 0, 4, 1, 1, timeout=7)
    barrier = BarrierAllContext(False, timeout=7)
    made = DispatchCombineContext.create(_config(), timeout=7)
    monkeypatch.setenv("WINNOW_TIMEOUT_SECONDS", "9")
    usual = BarrierAllContext(False)
    assert layer._all_to_all.timeout == barrier._layer.timeout == made._barrier._layer.timeout == 7
    assert usual._layer.timeout == 9
    for one in (layer, barrier, made, usual):
        one.finalize()
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    for alone_of_two in (
        lambda: EPAll2AllLayer(None, 4, 8, 3, 0, 4, 2, 2, timeout=0.2),
        lambda: DispatchCombineContext.create(_config(2), timeout=0.2),
        lambda: BarrierAllContext(True, timeout=0.2),
    ):
        with pytest.raises(winnow.Error, match="rank 1 has not arrived within 0.2 s") as caught:
            alone_of_two()
        assert caught.value.code == "timeout"


def test_a_constructor_that_fails_on_one_rank_counts_as_a_world(alone, monkeypatch):  # noqa: F811
    """So that this rank's next world meets that of the others."""
    initialize_distributed()
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    numbers = []

    def meet(*arguments, prefix, **options):
        numbers.append(int(prefix.removeprefix("winnow/")))
        raise winnow.Error("nobody else comes")

    def fails():
        raise RuntimeError("here alone")

    monkeypatch.setattr(rendezvous, "create_shared_memory", meet)
    for device in ("cpu", "nonsense", "cpu"):
        with pytest.raises(RuntimeError):  # a winnow.Error is one
            EPAll2AllLayer(None, 4, 8, 3, 0, 4, 2, 2, device=device)
    for default in (fails, lambda: torch.device("cpu")):
        monkeypatch.setattr(rendezvous, "default_device", default)
        with pytest.raises(RuntimeError):
            BarrierAllContext(False)
    assert numbers == [numbers[0] + n for n in (0, 2, 4)]


def test_a_rank_that_does_not_join_is_an_error(alone, monkeypatch):  # noqa: F811
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", "0")):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.DistError, match="(?i)timed out"):
        initialize_distributed(timeout=1)
    with pytest.raises(ValueError, match="initialize_distributed"):
        BarrierAllContext(False)
    with pytest.raises(ValueError, match="initialize_distributed"):
        barrier_all_on_stream(None)


def test_the_barrier_of_all_ranks_lives_as_long_as_the_group(alone):  # noqa: F811
    barrier_all_on_stream(None)  # alone, without a group
    assert not context._worlds
    initialize_distributed()
    barrier_all_on_stream(None)
    (first,) = context._worlds.values()
    barrier_all_on_stream(None, None)
    assert list(context._worlds.values()) == [first]
    finalize_distributed()
    gc.collect()
    assert not context._worlds


def test_rows_of_the_context_are_a_whole_number(alone):  # noqa: F811
    made = DispatchCombineContext.create(_config(), capacity=1.6)
    assert made.dispatch_output_buf.shape == (19, 8) and made.weight_recv_buf.shape == (19,)
    rows, weights = made.reallocate_dispatch_output_buf(19)
    assert rows is made.dispatch_output_buf and weights is made.weight_recv_buf
    made.finalize()


_GPUS = {"count": 2, "capability": (9, 0), "reason": "", "nvshmem": "", "ranks": "2"}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"count": 0}, None),  # no GPU, no question
        ({}, ""),
        ({"nvshmem": "no NVSHMEM", "ranks": "1"}, ""),  # one rank needs none
        ({"count": 1}, "this process sees 1 GPUs: there are 2 ranks on this machine"),
        ({"capability": (8, 0)}, "sees 2 GPUs: want compute capability 9.0, got 8.0"),
        ({"reason": "no kernels"}, "sees 2 GPUs: no kernels"),
        ({"nvshmem": "no NVSHMEM"}, "sees 2 GPUs: no NVSHMEM"),
    ],
)
def test_the_cpu_is_not_chosen_silently_where_there_are_gpus(found, text, monkeypatch):
    found = {**_GPUS, **found}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, found["ranks"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found["count"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found["capability"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    cuda = {"name": "cuda", "supported": not found["reason"], "reason": found["reason"]}
    monkeypatch.setattr(rendezvous, "backends", lambda: [cuda])
    monkeypatch.setattr(rendezvous, "nvshmem_obstacle", lambda: found["nvshmem"])
    if text:
        with pytest.warns(RuntimeWarning, match=re.escape(text)):
            assert rendezvous.default_device() == torch.device("cpu")
    else:
        chosen = torch.device("cuda", 1) if text is not None else torch.device("cpu")
        assert rendezvous.default_device() == chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_layer_says_why_it_is_on_the_cpu(alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (reason,) = (b["reason"] for b in winnow.backends() if b["name"] == "cuda")
    with pytest.warns(RuntimeWarning, match=re.escape(reason)) as caught:
        layer = EPAll2AllLayer(None, 4, 8, 3, 0, 4, 1, 1)
    assert layer.device == torch.device("cpu") and caught[0].filename == __file__
    EPAll2AllLayer(None, 4, 8, 3, 0, 4, 1, 1, device="cpu")  # as asked


def test_one_process_is_a_world(alone):  # noqa: F811
    assert initialize_distributed(seed=4) == (0, 1)
    drawn = torch.rand(3)
    assert initialize_distributed(4) == (0, 1)  # the group is there; seeded again
    assert torch.equal(torch.rand(3), drawn)
    layer = EPAll2AllLayer(dist.group.WORLD, 4, 8, 2, 0, 4, 1, 1, torch.float32)
    attributes = {n for n in vars(layer) if not n.startswith("_")} - set(vars(torch.nn.Module()))
    assert {"ep_group", "num_sm", "offset_dtype", "a2a_ctx"} <= attributes
    assert all(re.search(rf"\b{name}\b", EPAll2AllLayer.__doc__) for name in attributes)
    tokens = torch.arange(24.0).view(3, 8)
    output, weights, desc = layer.dispatch(tokens, torch.tensor([[3, 0], [4, 1], [-1, 4]]).int())
    assert weights is None and torch.equal(output, tokens[[0, 1, 0]])
    combined = layer.combine(output, desc)
    assert torch.equal(combined, torch.stack([2 * tokens[0], tokens[1], torch.zeros(8)]))
    settled = layer._all_to_all.arena_bytes
    kept = [layer.dispatch(tokens, torch.zeros(3, 2).int())[0] for _ in range(20)]
    assert len(kept) == 20 and layer._all_to_all.arena_bytes == settled  # outputs are copies
    layer.finalize()
    with pytest.raises(ValueError, match="the layer is closed"):
        layer.dispatch(tokens, torch.zeros(3, 2).int())
    assert torch.equal(output, tokens[[0, 1, 0]])  # the caller's


@pytest.mark.parametrize("local_world_size", [-1, 2])
def test_a_local_world_size_that_is_excluded_is_named(alone, local_world_size):  # noqa: F811
    text = f"local_world_size: want 1 to 1, got {local_world_size}"
    with pytest.raises(ValueError, match=text):
        EPAll2AllLayer(None, 4, 8, 2, 0, 4, local_world_size, 1, device="cpu")
    assert EPAll2AllLayer(None, 4, 8, 2, 0, 4, 0, 1, device="cpu").local_world_size == 1  # all


def test_a_combine_without_a_descriptor_is_the_librarys_to_refuse(alone):  # noqa: F811
    layer = EPAll2AllLayer(None, 4, 8, 2, 0, 4, 1, 1, torch.float32, device="cpu")
    tokens = torch.ones(3, 8)
    output, _, desc = layer.dispatch(tokens, torch.zeros(3, 2).int())
    with pytest.raises(ValueError, match="combine: rank 0: descriptor: want a .*, got tuple"):
        layer.combine(output, (output, desc))
    assert torch.equal(layer.combine(output, desc), 2 * tokens)
    layer.finalize()


def test_without_a_process_group_the_error_says_what_to_do(alone):  # noqa: F811
    with pytest.raises(ValueError, match="initialize_distributed"):
        EPAll2AllLayer(None, 4, 8, 2, 0, 4, 2, 2)


def test_reading_a_name_imports_torch_only_then():
    program = (
        "import sys, winnow.expert_parallel as ep\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'EPConfig', 'AllToAll'} <= set(ep.__all__)\n"
        "try:\n"
        "    ep.EPAll3AllLayer\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    result = python("-c", program)
    assert result.stdout.startswith("module 'winnow.expert_parallel' has no attribute"), result
