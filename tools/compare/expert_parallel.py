"""winnow.compat.deep_ep beside deep_ep, each with buffers of its own over the same ranks.

Start it as the ranks of one world: torchrun --nproc-per-node 4 tools/compare expert_parallel
"""

import os
from typing import Any, Callable, Dict, Iterator

import torch
from runner import Problem, World, cosine, find
from winnow.compat import deep_ep as ours

HIDDEN, TOPK, EXPERTS, LOW_LATENCY_EXPERTS, SMS = 7168, 8, 256, 288, 24
NVLINK_BYTES = 10**9


def world(device: torch.device) -> World:
    """The ranks of the launcher, or a world of this process alone."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    return World(device, torch.distributed.group.WORLD)


def _calls(module: Any, where: World, tokens: Any, experts: Any) -> Dict[str, Callable[[], Any]]:
    module.Buffer.set_num_sms(SMS)
    buffer = module.Buffer(where.group, NVLINK_BYTES, 0)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, EXPERTS)
    weights = torch.ones(experts.shape, device=where.device)

    def counted() -> Any:
        return buffer.dispatch(
            tokens, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=experts, topk_weights=weights,
        )  # fmt: skip

    received, _, _, _, handle, _ = counted()
    return {
        "dispatch": lambda: counted()[0],
        "cached-dispatch": lambda: buffer.dispatch(tokens, handle=handle)[0],
        "combine": lambda: buffer.combine(received, handle)[0],
    }


def _low_latency(
    module: Any, where: World, tokens: Any, experts: Any
) -> Dict[str, Callable[[], Any]]:
    size, count, all_experts = where.group.size(), len(tokens), LOW_LATENCY_EXPERTS
    needed = module.Buffer.get_low_latency_rdma_size_hint(count, HIDDEN, size, all_experts)
    buffer = module.Buffer(
        where.group, 0, needed, low_latency_mode=True, num_qps_per_rank=all_experts // size
    )
    weights = torch.ones(experts.shape, device=where.device)

    def dispatch(in_f8: bool) -> Any:
        return buffer.low_latency_dispatch(tokens, experts, count, all_experts, use_fp8=in_f8)

    rows, _, handle, _, _ = dispatch(False)
    rows = rows.clone()
    return {  # of a dispatch the counts alone are compared: what is behind them is anything
        "dispatch-f8": lambda: dispatch(True)[1],
        "dispatch-bf16": lambda: dispatch(False)[1],
        "combine-bf16": lambda: buffer.low_latency_combine(rows, experts, weights, handle)[0],
    }


def _sums(ours: Any, theirs: Any) -> float:
    """Of rows whose order is open."""
    return cosine(ours.double().sum(0), theirs.double().sum(0))


def _problems(operation: str, where: World, count: int, experts: int, build: Any) -> Iterator:
    torch.manual_seed(1 + where.group.rank())
    tokens = torch.randn(count, HIDDEN, device=where.device).bfloat16()
    chosen = torch.rand(count, experts, device=where.device).topk(TOPK).indices
    shape = f"{where.group.size()} ranks, n {count}, H {HIDDEN}, K {TOPK}, E {experts}, {SMS} SMs"
    mine, theirs = (build(module, where, tokens, chosen) for module in (ours, find("deep_ep")))
    for name, call in mine.items():
        agreement = _sums if name in ("dispatch", "cached-dispatch") else cosine
        peers = {"deep_ep": theirs[name]}
        yield Problem(operation, f"buffer-{name}-n{count}", shape, call, peers, agreement, 0.9999)


def all_to_all(where: World) -> Iterator[Problem]:
    """The calls of training."""
    count = 4096 if where.device.type == "cuda" else 32
    return _problems("expert_parallel::all_to_all", where, count, EXPERTS, _calls)


def low_latency(where: World) -> Iterator[Problem]:
    """The calls of decode steps."""
    for count in (128, 256, 512) if where.device.type == "cuda" else (8,):
        operation = "expert_parallel::low_latency"
        yield from _problems(operation, where, count, LOW_LATENCY_EXPERTS, _low_latency)


OPERATIONS = {
    "expert_parallel::all_to_all": (all_to_all, ["deep_ep"]),
    "expert_parallel::low_latency": (low_latency, ["deep_ep"]),
}
