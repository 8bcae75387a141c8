"""indexer beside cudnn-frontend (scores and choice, gradients) and DeepGEMM (scores in f8).

Peers score all rows and choose from the stored scores in a second call; both calls are timed.
Scores alone are those of winnow.compat.deep_gemm, with DeepGEMM's arguments.
"""

import contextlib
from typing import Any, Callable, Iterator, Tuple

import torch
from runner import Problem, chosen, cosine, find
from winnow.compat import deep_gemm as stand_in

from winnow import indexer

HEADS, D = 64, 128


def _sizes(device: torch.device) -> Tuple:
    """Queries, chosen rows, and the sizes of the cache."""
    return (4096, 2048, (8192, 32768, 131072)) if device.type == "cuda" else (8, 64, (256,))


def _choose(cudnn: Any, scores: Any, lengths: Any, count: int) -> Any:
    """The largest of the first `lengths` scores of each row."""
    if cudnn is None:
        return scores.topk(count).indices
    return cudnn.DSA.indexer_top_k_wrapper(scores, lengths, count, next_n=1, return_val=False)[
        "indices"
    ]


def _chooser() -> str:
    return "cudnn" if find("cudnn") else "torch"


def _queries(s_q: int, s_k: int, device: torch.device) -> Tuple:
    """Queries, keys and weights, and the rows that queries at the end of the cache see."""
    torch.manual_seed(s_k)
    q = torch.randn(s_q, HEADS, D, device=device).bfloat16()
    k = torch.randn(s_k, D, device=device).bfloat16()
    weights = (torch.randn(s_q, HEADS, device=device) * (D * HEADS) ** -0.5).bfloat16()
    ends = torch.arange(s_k - s_q + 1, s_k + 1, dtype=torch.int32, device=device)
    return q, k, weights, ends


def _topk_bf16(q: Any, k: Any, weights: Any, ends: Any, count: int) -> Tuple:
    cudnn, start, offset = find("cudnn"), len(k) - len(q), ends[:1] - 1

    def ours() -> Any:
        return indexer.topk(q, k, weights, count, q_start=start)[0]

    def theirs() -> Any:
        scores = cudnn.DSA.indexer_forward_wrapper(
            q[None], k[None, :, None], weights[None], ratio=1, q_causal_offsets=offset
        )["scores"]
        return _choose(cudnn, scores[0], ends, count)

    return ours, {"cudnn": theirs} if cudnn else {}


def _topk_f8(q: Any, k: Any, weights: Any, ends: Any, count: int) -> Tuple:
    deep_gemm, cudnn, start = find("deep_gemm"), find("cudnn"), len(k) - len(q)
    (q, q_scale), (k, k_scale) = indexer.quantize(q), indexer.quantize(k)
    weights, begins = weights.float() * q_scale, torch.zeros_like(ends)

    def ours() -> Any:
        return indexer.topk(q, k, weights, count, k_scale=k_scale, q_start=start)[0]

    def theirs() -> Any:
        scores = deep_gemm.fp8_mqa_logits(
            q, (k, k_scale), weights, begins, ends, clean_logits=cudnn is None
        )
        return _choose(cudnn, scores, ends, count)

    return ours, {f"deep_gemm + {_chooser()}": theirs} if deep_gemm else {}


def topk(device: torch.device) -> Iterator[Problem]:
    """Queries at the end of the cache, as in a prefill by chunks."""
    s_q, count, rows = _sizes(device)
    for dtype, calls, least in (("bf16", _topk_bf16, 0.999), ("f8_e4m3", _topk_f8, 0.99)):
        for s_k in rows:
            ours, peers = calls(*_queries(s_q, s_k, device), count)
            yield Problem(
                "indexer::topk",
                f"{dtype}-h{HEADS}-sk{s_k}",
                f"s_q {s_q} at the end, h {HEADS}, d {D}, s_k {s_k}, topk {count}",
                ours,
                peers,
                chosen,
                least,
                flops=2.0 * (s_q * s_k - 0.5 * s_q * (s_q - 1)) * HEADS * D,
            )


def _seen(ends: Any) -> Callable[[Any, Any], float]:
    """The cosine between scores of the rows that each query sees; others are undefined."""

    def agreement(*sides: Any) -> float:
        behind = torch.arange(sides[0].shape[1], device=ends.device) >= ends[:, None]
        return cosine(*(side.masked_fill(behind, 0) for side in sides))

    return agreement


def scores(device: torch.device) -> Iterator[Problem]:
    """All scores of queries at the end of the cache, in f8."""
    deep_gemm = find("deep_gemm")
    s_q, _, rows = _sizes(device)
    for s_k in rows:
        q, k, weights, ends = _queries(s_q, s_k, device)
        (q, q_scale), kv = indexer.quantize(q), indexer.quantize(k)
        given = q, kv, weights.float() * q_scale, torch.zeros_like(ends), ends
        yield Problem(
            "indexer::scores",
            f"f8_e4m3-h{HEADS}-sk{s_k}",
            f"s_q {s_q} at the end, h {HEADS}, d {D}, s_k {s_k}",
            lambda: stand_in.fp8_mqa_logits(*given, clean_logits=False),  # noqa: B023
            {"deep_gemm": lambda: deep_gemm.fp8_mqa_logits(*given, clean_logits=False)},  # noqa: B023
            _seen(ends),
            0.9999,
            flops=2.0 * (s_q * s_k - 0.5 * s_q * (s_q - 1)) * HEADS * D,
        )
    yield from _of_sequences(device)


def _of_sequences(device: torch.device) -> Iterator[Problem]:
    """Scores from the first key of each query's sequence on, as vLLM calls it: one sequence and
    several packed ones, each of as many queries at its end."""
    deep_gemm = find("deep_gemm")
    s_q = _sizes(device)[0]
    several = ((8192, 1), (131072, 1), (131072, 16))  # all keys, and the sequences that have them
    for s_k, count in several if device.type == "cuda" else ((256, 2),):
        q, k, weights, _ = _queries(s_q, s_k, device)
        (q, q_scale), kv, width = indexer.quantize(q), indexer.quantize(k), s_k // count
        of, place = torch.arange(s_q, device=device), s_q // count
        begins = (of // place * width).int()
        ends = (begins + width - place + 1 + of % place).int()
        given = kv, weights.float() * q_scale, begins, ends

        def theirs(q: Any = q, given: Any = given, width: int = width) -> Any:
            if older := getattr(deep_gemm, "fp8_mqa_logits", None):
                return older(q, *given, clean_logits=False, max_seqlen_k=width)
            return deep_gemm.fp8_fp4_mqa_logits((q, None), *given, width)

        yield Problem(
            "indexer::scores",
            f"f8_e4m3-h{HEADS}-sk{s_k}-of{count}",
            f"s_q {s_q}, h {HEADS}, d {D}, {count} x {width} rows and columns",
            lambda: stand_in.fp8_fp4_mqa_logits((q, None), *given, width),  # noqa: B023
            {"deep_gemm": theirs},
            _seen(ends - begins),
            0.9999,
            flops=2.0 * s_q * (width - 0.5 * (place - 1)) * HEADS * D,
        )


def _pages(b: int, s_q: int, rows: int, device: torch.device) -> Tuple:
    """Queries, pages of keys, weights, tables and lengths of a decode step."""
    torch.manual_seed(s_q)
    pages = torch.zeros(b * rows // 64, 64 * (D + 4), dtype=torch.uint8, device=device)
    for i in range(b):
        keys = torch.randn(rows, D, device=device).bfloat16()
        slots = torch.arange(i * rows, (i + 1) * rows, device=device)
        indexer.quantize(keys, pages=pages, slots=slots)
    tables = torch.arange(len(pages), dtype=torch.int32, device=device).view(b, -1)
    lengths = torch.full((b,), rows, dtype=torch.int32, device=device)
    q, q_scale = indexer.quantize(torch.randn(b * s_q, HEADS, D, device=device).bfloat16())
    weights = torch.randn(b * s_q, HEADS, device=device) * (D * HEADS) ** -0.5 * q_scale
    return q.view(b, s_q, HEADS, D), pages, weights, tables, lengths


def _paged(b: int, s_q: int, rows: int, count: int, device: torch.device) -> Tuple:
    deep_gemm, cudnn = find("deep_gemm"), find("cudnn")
    q, pages, weights, tables, lengths = _pages(b, s_q, rows, device)
    ends = (lengths[:, None] - s_q + 1 + torch.arange(s_q, device=device)).int()
    plan = deep_gemm.get_paged_mqa_logits_metadata(ends, 64, deep_gemm.get_num_sms())

    def ours() -> Any:
        return indexer.topk_paged(
            q, pages, weights.view(b, s_q, HEADS), tables, lengths, count, positions=True
        )[0]

    def theirs() -> Any:
        # It cleans none where lengths are by query: torch may choose the row behind a query's last.
        scores = deep_gemm.fp8_paged_mqa_logits(
            q, pages.view(-1, 64, 1, D + 4), weights, ends, tables, plan, rows, clean_logits=False
        )
        return _choose(cudnn, scores, ends.flatten(), count)

    return ours, {f"deep_gemm + {_chooser()}": theirs}


def topk_paged(device: torch.device) -> Iterator[Problem]:
    """Decode steps over pages of keys in 8 bits."""
    b, rows, count = (64, 32768, 2048) if device.type == "cuda" else (2, 256, 64)
    for s_q in (1, 2):
        name = f"b{b}-sq{s_q}-h{HEADS}-sk{rows}"
        shape = f"b {b}, s_q {s_q}, h {HEADS}, d {D}, rows {rows}, topk {count}"
        calls = _paged(b, s_q, rows, count, device)
        yield Problem("indexer::topk_paged", name, shape, *calls, chosen, 0.99)


def scores_paged(device: torch.device) -> Iterator[Problem]:
    """All scores of decode steps over pages of keys in 8 bits."""
    deep_gemm = find("deep_gemm")
    for b, rows in ((2, 32768), (64, 32768), (128, 8192)) if device.type == "cuda" else ((2, 256),):
        q, pages, weights, tables, lengths = _pages(b, 1, rows, device)
        ends = lengths[:, None]
        plan = deep_gemm.get_paged_mqa_logits_metadata(ends, 64, deep_gemm.get_num_sms())
        keys = pages.view(-1, 64, 1, D + 4)
        yield Problem(
            "indexer::scores_paged",
            f"b{b}-sq1-h{HEADS}-sk{rows}",
            f"b {b}, s_q 1, h {HEADS}, d {D}, rows {rows}",
            lambda: stand_in.fp8_paged_mqa_logits(
                q, keys, weights, ends, tables, plan, rows, clean_logits=False  # noqa: B023
            ),
            {
                "deep_gemm": lambda: deep_gemm.fp8_paged_mqa_logits(
                    q, keys, weights, ends, tables, plan, rows, clean_logits=False  # noqa: B023
                )
            },
            cosine,
            0.9999,
            graph=True,
        )  # fmt: skip


def _gradients(q: Any, k: Any, weights: Any, count: int) -> Tuple:
    cudnn, start = find("cudnn"), len(k) - len(q)
    rows = indexer.topk(q, k, weights, count, q_start=start)[0]
    target, predicted = (torch.rand(1, len(q), count, device=q.device) for _ in range(2))
    d_scores = target.clone()

    def theirs(target: Any = target, predicted: Any = predicted) -> Any:
        made = cudnn.DSA.indexer_backward_wrapper(
            q[None], weights[None], k[None], target, predicted, rows[None]
        )
        return made["d_index_q"][0], made["d_index_k"][0], made["d_weights"][0]

    with contextlib.suppress(Exception):  # which measure() reports
        theirs(d_scores, predicted.clone())  # leaves the gradients of scores there, which we take
    ours = lambda: indexer.backward(q, k, weights, rows, d_scores[0], q_start=start)  # noqa: E731
    return ours, {"cudnn": theirs}


def backward(device: torch.device) -> Iterator[Problem]:
    """The gradients of chosen scores."""
    s_q, count, rows = _sizes(device)
    for s_k in rows:
        ours, peers = _gradients(*_queries(s_q, s_k, device)[:3], count)
        yield Problem(
            "indexer::backward",
            f"bf16-h{HEADS}-sk{s_k}-k{count}",
            f"s_q {s_q} at the end, h {HEADS}, d {D}, s_k {s_k}, topk {count}",
            ours,
            peers,
            cosine,
            0.999,
            flops=3 * 2.0 * s_q * count * HEADS * D,
        )


OPERATIONS = {
    "indexer::topk": (topk, ["cudnn", "deep_gemm"]),
    "indexer::topk_paged": (topk_paged, ["deep_gemm"]),
    "indexer::scores": (scores, ["deep_gemm"]),
    "indexer::scores_paged": (scores_paged, ["deep_gemm"]),
    "indexer::backward": (backward, ["cudnn"]),
}
