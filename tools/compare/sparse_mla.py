"""sparse_mla beside FlashMLA (forward, decode) and cudnn-frontend (distribution, backward).

Beside FlashMLA, Winnow's side is the module that replaces it, winnow.compat.flash_mla, with the
same arguments; only layers of two sources are no call of FlashMLA's.
"""

import functools
import inspect
import math
from typing import Any, Callable, Iterator, Tuple

import torch
from runner import Problem, cosine, find, of_hopper
from winnow.compat import flash_mla as stand_in

from winnow import sparse_mla

D_QK, D_V, SCALE = 576, 512, 576**-0.5
STEPS = (  # format, b, heads, topk of decode steps of two queries
    ("fp8_656", 2, 128, 2048),
    ("fp8_656", 64, 128, 2048),
    ("fp8_656", 74, 128, 2048),
    ("fp8_656", 128, 128, 2048),
    ("fp8_656", 148, 64, 16384),
    ("fp8_656", 148, 128, 16384),
    ("fp8_584", 2, 128, 2048),
    ("fp8_584", 64, 128, 2048),
    ("fp8_584", 64, 64, 2048),
)
DENSE = ((64, 4096), (128, 4096), (64, 16384), (128, 16384))  # b, rows of a context
LAYERS = ((64, 512), (128, 1024))  # heads, chosen rows of DeepSeek-V4's CSA
STEPS_ON_CPU = (("fp8_656", 2, 16, 128), ("fp8_584", 2, 16, 128))
Calls = Tuple[Callable[[], Any], Callable[[], Any]]


def _rows(s_q: int, s_kv: int, topk: int, device: torch.device) -> torch.Tensor:
    """Distinct random rows in random order for every query, int32 [s_q, topk]."""
    parts = [
        torch.rand(min(512, s_q - at), s_kv, device=device).topk(topk).indices.int()
        for at in range(0, s_q, 512)
    ]
    return torch.cat(parts)


def _base_2(device: torch.device) -> Iterator[Problem]:
    """As SGLang calls it, with logarithms of base 2: the lse is compared. A build of FlashMLA that
    has no such argument is followed by the products that its callers form."""
    theirs, gpu = of_hopper(find("flash_mla").flash_mla_sparse_fwd), device.type == "cuda"
    s_q, heads, s_kv, topk = (4096, 128, 32768, 2048) if gpu else (8, 16, 256, 128)
    torch.manual_seed(heads)
    q = torch.randn(s_q, heads, D_QK, device=device).bfloat16()
    kv = torch.randn(s_kv, 1, D_QK, device=device).bfloat16()
    given = q, kv, _rows(s_q, s_kv, topk, device)[:, None], SCALE
    has = "return_log2_lse" in inspect.signature(theirs).parameters

    def peer() -> Any:
        if has:
            return theirs(*given, return_log2_lse=True)[2]
        return [logarithm * math.log2(math.e) for logarithm in theirs(*given)[1:]][1]

    yield Problem(
        "sparse_mla::forward",
        f"bf16-h{heads}-kv{s_kv}-log2",
        f"s_q {s_q}, h_q {heads}, s_kv {s_kv}, topk {topk}, d_qk {D_QK}, base 2",
        lambda: stand_in.flash_mla_sparse_fwd(*given, return_log2_lse=True)[2],
        {"flash_mla": peer},
        cosine,
        0.9999,
        flops=2.0 * s_q * heads * topk * (D_QK + D_V),
    )


def _forward(flash_mla: Any, q: Any, kv: Any, rows: Any) -> Calls:
    theirs, rows = of_hopper(flash_mla.flash_mla_sparse_fwd), rows[:, None]
    return (
        lambda: stand_in.flash_mla_sparse_fwd(q, kv, rows, SCALE)[0],
        lambda: theirs(q, kv, rows, SCALE)[0],
    )


def _layers(device: torch.device) -> Iterator[Problem]:
    """DeepSeek-V4's CSA: a window and chosen rows, which they get as one cache and one list."""
    gpu = device.type == "cuda"
    theirs = of_hopper(find("flash_mla").flash_mla_sparse_fwd)
    for heads, count in LAYERS if gpu else ((16, 8),):
        tokens, window = (16384, 128) if gpu else (64, 16)
        torch.manual_seed(heads)
        q = torch.randn(tokens, heads, D_V, device=device).bfloat16()
        kv = torch.randn(tokens, 1, D_V, device=device).bfloat16()
        extra = torch.randn(tokens // 4, 1, D_V, device=device).bfloat16()
        rows = _rows(tokens, len(extra), count, device)
        ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=device)
        begins = (ends - window).clamp(min=0)
        near = ends[:, None] - window + torch.arange(window, dtype=torch.int32, device=device)
        both = torch.cat([kv, extra])
        listed = torch.cat([near.clamp(min=-1), rows + tokens], dim=1)[:, None]
        scale = D_V**-0.5
        yield Problem(
            "sparse_mla::forward",
            f"bf16-h{heads}-csa",
            f"s_q {tokens}, h_q {heads}, window {window}, {count} of {len(extra)}, d_qk {D_V}",
            lambda: sparse_mla.forward(  # noqa: B023
                q, kv, None, key_start=begins, key_end=ends, extra_kv=extra, extra_indices=rows  # noqa: B023
            )[0],
            {"flash_mla": lambda: theirs(q, both, listed, scale)[0]},  # noqa: B023
            cosine,
            0.9999,
            flops=2.0 * tokens * heads * (window + count) * 2 * D_V,
        )  # fmt: skip


def forward(device: torch.device) -> Iterator[Problem]:
    """Chosen rows of one cache, and layers of two sources."""
    yield from _over_rows("forward", "flash_mla", D_QK + D_V, _forward, device)
    yield from _base_2(device)
    yield from _layers(device)


def _distribution(cudnn: Any, q: Any, kv: Any, rows: Any) -> Calls:
    lse = sparse_mla.forward(q, kv, rows)[2]
    # The sum of a query is 1 in theirs and the number of heads in ours, which a cosine ignores.
    return (
        lambda: sparse_mla.distribution(q, kv, rows, lse),
        lambda: cudnn.DSA.sparse_attn_score_recompute_wrapper(
            q[None], kv[None, :, 0], lse[None], rows[None], SCALE, qhead_per_kv_head=q.shape[1]
        )["target"],
    )


def _backward(cudnn: Any, q: Any, kv: Any, rows: Any) -> Calls:
    out, _, lse = sparse_mla.forward(q, kv, rows)
    d_out, no_sink = torch.randn_like(out), torch.full_like(lse[0], -torch.inf)

    def theirs() -> Any:
        made = cudnn.DSA.sparse_attention_backward_wrapper(
            q, kv[:, 0], out, d_out, lse, no_sink, rows, softmax_scale=SCALE
        )
        return made["dq"], made["dkv"]

    return lambda: sparse_mla.backward(q, kv, rows, out, lse, d_out), theirs


def _over_rows(
    name: str, peer: str, columns: int, calls: Callable[..., Calls], device: torch.device
) -> Iterator[Problem]:
    """The problems of an operation that reads chosen rows; columns of FLOPs for each of them."""
    gpu = device.type == "cuda"
    for heads in (128, 64) if gpu else (16,):
        for s_kv in (8192, 32768, 131072) if gpu else (256,):
            s_q, topk = (4096, 2048) if gpu else (8, 128)
            torch.manual_seed(s_kv + heads)
            q = torch.randn(s_q, heads, D_QK, device=device).bfloat16()
            kv = torch.randn(s_kv, 1, D_QK, device=device).bfloat16()
            ours, theirs = calls(find(peer), q, kv, _rows(s_q, s_kv, topk, device))
            yield Problem(
                f"sparse_mla::{name}",
                f"bf16-h{heads}-kv{s_kv}",
                f"s_q {s_q}, h_q {heads}, s_kv {s_kv}, topk {topk}, d_qk {D_QK}",
                ours,
                {peer: theirs},
                cosine,
                0.9999,
                flops=2.0 * s_q * heads * topk * columns,
            )


def _cache(kind: str, columns: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Blocks of 64 rows, all with the same random ones."""
    row = int(kind.removeprefix("fp8_"))
    size = -(-64 * row // 576) * 576 if row == 584 else 64 * row
    memory = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
    cache = memory.as_strided((blocks, 64, 1, row), (size, row, row, 1))
    rows = torch.randn(64, columns, device=device).bfloat16()
    sparse_mla.store(rows, cache, torch.arange(64, device=device), format=kind)
    memory[1:] = memory[0]
    return cache


def _step(
    flash_mla: Any, name: str, shape: str, flops: float, *arguments: Any, **options: Any
) -> Problem:
    """A call of flash_mla_with_kvcache with these arguments, as both sides take them."""
    call = of_hopper(flash_mla.flash_mla_with_kvcache)
    return Problem(
        "sparse_mla::decode",
        name,
        shape,
        lambda: stand_in.flash_mla_with_kvcache(*arguments, **options)[0],
        {"flash_mla": lambda: call(*arguments, **options)[0]},
        cosine,
        0.9999,
        flops=flops,
        graph=True,
    )


def _dense(flash_mla: Any, device: torch.device) -> Iterator[Problem]:
    """All rows of paged contexts in bf16, one query a sequence."""
    heads = 128
    for b, rows in DENSE if device.type == "cuda" else ((2, 128),):
        torch.manual_seed(b)
        q = torch.randn(b, 1, heads, D_QK, device=device).bfloat16()
        cache = torch.randn(b * rows // 64, 64, 1, D_QK, device=device).bfloat16()
        tables = torch.randperm(len(cache), device=device).int().view(b, -1)
        lengths = torch.full((b,), rows, dtype=torch.int32, device=device)
        plan = flash_mla.get_mla_metadata(lengths, heads, 1)[0]
        yield _step(
            flash_mla, f"bf16_576-b{b}-sq1-h{heads}-dense{rows}",
            f"b {b}, h_q {heads}, all of {rows} rows", 2.0 * b * heads * rows * (D_QK + D_V),
            q, cache, tables, lengths, D_V, plan, softmax_scale=SCALE, causal=False,
        )  # fmt: skip


def decode(device: torch.device) -> Iterator[Problem]:
    """Steps over the cache of as many sequences, in calls whose bits may depend on the batch."""
    flash_mla, gpu = find("flash_mla"), device.type == "cuda"
    context = 32768 if gpu else 256
    for kind, b, heads, topk in STEPS if gpu else STEPS_ON_CPU:
        torch.manual_seed(b + heads)
        columns = D_QK if kind == "fp8_656" else 512
        cache = _cache(kind, columns, b * context // 64, device)
        q = torch.randn(b, 2, heads, columns, device=device).bfloat16()
        rows = _rows(2 * b, context, topk, device).view(b, 2, topk)
        rows += context * torch.arange(b, dtype=torch.int32, device=device)[:, None, None]
        plan = flash_mla.get_mla_metadata()[0]
        in_f8 = cache.view(torch.float8_e4m3fn)
        yield _step(
            flash_mla, f"{kind}-b{b}-sq2-h{heads}-k{topk}",
            f"s_kv {context}, s_q 2, b {b}, h_q {heads}, topk {topk}",
            2.0 * 2 * b * heads * topk * (columns + D_V),
            q, in_f8, None, None, D_V, plan, is_fp8_kvcache=True, indices=rows,
        )  # fmt: skip
    yield from _dense(flash_mla, device)


OPERATIONS = {
    "sparse_mla::forward": (forward, ["flash_mla"]),
    "sparse_mla::decode": (decode, ["flash_mla"]),
    "sparse_mla::distribution": (
        functools.partial(_over_rows, "distribution", "cudnn", D_QK, _distribution),
        ["cudnn"],
    ),
    "sparse_mla::backward": (
        functools.partial(_over_rows, "backward", "cudnn", 3 * D_QK + 2 * D_V, _backward),
        ["cudnn"],
    ),
}
