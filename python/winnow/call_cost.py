"""The cost of a call from Python: ``python -m winnow bench python``.

Calls without queries (sparse_mla) or sequences (paged_xl), or with one token on one rank
(expert_parallel), so that the library does next to nothing. Functions of winnow.compat are compared
with the functions that they call.
Each figure is the smallest of many short runs: what the code costs, not what else the machine does.
"""

import argparse
import importlib
import json
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

from winnow import expert_parallel, paged_xl, sparse_mla

_CALLS = 200
_RUNS = 200

LIMIT_PLAIN = 10e-6
"""Seconds that a call may cost."""
LIMIT_OPERATOR = 25e-6
"""The same through the torch operator."""
LIMIT_STAND_IN = 5e-6
"""Seconds that a function of winnow.compat may cost beyond the operation's own in Python."""


def _seconds_of_calls(*calls: Callable[[], Any]) -> List[float]:
    """Of each call; they run in turn, so that all of them meet the machine when it is quiet."""
    best = [float("inf")] * len(calls)
    for _ in range(_RUNS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / _CALLS)
    return best


def _result(name: str, what: str, cost: float, limit: float) -> Dict[str, Any]:
    return {
        "operation": "python",
        "benchmark": name,
        "shape": what,
        "seconds": cost,
        "target_seconds": limit,
        "reached": cost <= limit,
    }


def _measure(
    name: str, call: Callable[[], Any], what: str = "sparse_mla::forward without queries"
) -> Dict[str, Any]:
    call()
    (cost,) = _seconds_of_calls(call)
    of_operator = name.startswith("torch operator")
    return _result(name, what, cost, LIMIT_OPERATOR if of_operator else LIMIT_PLAIN)


def _stand_ins() -> Iterator[Dict[str, Any]]:
    """The functions of winnow.compat for torch, beside those that they call."""
    import torch

    for name, call, plain in (*_of_flash_mla(torch), *_of_deep_gemm(torch)):
        with_stand_in, without = _seconds_of_calls(call, plain)
        what = "without queries, beyond the operation's own function"
        yield _result(name, what, with_stand_in - without, LIMIT_STAND_IN)


def _of_flash_mla(torch: Any) -> Iterator[Tuple]:
    from winnow.compat.flash_mla import (
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    def zeros(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.zeros(shape, dtype=dtype)

    decode, i32, u8, plan = sparse_mla.decode, torch.int32, torch.uint8, get_mla_metadata()[0]
    q, kv, rows = zeros(0, 64, 576), zeros(16, 1, 576), zeros(0, 1, 64, dtype=i32)
    yield (
        "flash_mla_sparse_fwd",
        lambda: flash_mla_sparse_fwd(q, kv, rows, 0.1),
        lambda: sparse_mla.forward(q, kv, rows, scale=0.1),
    )
    as_sglang = {"use_legacy": True, "return_log2_lse": True}
    yield (
        "the same, base 2",
        lambda: flash_mla_sparse_fwd(q, kv, rows, 0.1, 512, None, None, **as_sglang),
        lambda: sparse_mla.forward(q, kv, rows, scale=0.1),
    )
    step, cache_f8 = q[:, None], zeros(2, 64, 1, 656, dtype=u8)
    yield (
        "flash_mla_with_kvcache",
        lambda: flash_mla_with_kvcache(
            step, cache_f8, None, None, 512, plan, is_fp8_kvcache=True, indices=rows
        ),
        lambda: decode(step, cache_f8, rows),
    )
    q_v4, v4, sink, n = (
        zeros(0, 1, 64, 512),
        zeros(1, 64, 1, 584, dtype=u8),
        torch.zeros(64),
        rows[:, 0, 0],
    )
    yield (
        "flash_mla_with_kvcache, V4",
        lambda: flash_mla_with_kvcache(
            q_v4, v4, None, None, 512, plan, is_fp8_kvcache=True, indices=rows, attn_sink=sink,
            extra_k_cache=v4, extra_indices_in_kvcache=rows, topk_length=n, extra_topk_length=n,
        ),
        lambda: decode(
            q_v4, v4, rows, format="fp8_584", attn_sink=sink, extra_cache=v4, extra_indices=rows,
            topk_length=n, extra_topk_length=n,
        ),
    )  # fmt: skip
    cache, tables, lens = zeros(2, 64, 1, 576), zeros(0, 2, dtype=i32), zeros(0, dtype=i32)
    yield (
        "flash_mla_with_kvcache, dense",
        lambda: flash_mla_with_kvcache(step, cache, tables, lens, 512, plan),
        lambda: decode(step, cache, format="bf16", block_tables=tables, context_lens=lens),
    )
    two = zeros(0, 2, 64, 576)
    yield (
        "the same, two causal queries",
        lambda: flash_mla_with_kvcache(two, cache, tables, lens, 512, plan, causal=True),
        lambda: decode(two, cache, format="bf16", block_tables=tables, context_lens=lens),
    )
    yield (
        "the same, two that see all rows",
        lambda: flash_mla_with_kvcache(two, cache, tables, lens, 512, plan),
        lambda: decode(two, cache, format="bf16", block_tables=tables, context_lens=lens),
    )
    plain, step_f8 = cache_f8[..., :576].contiguous(), step.to(torch.float8_e4m3fn)
    of_plain = {"format": "fp8_576", "block_tables": tables, "context_lens": lens}
    yield (
        "the same, rows in 8 bits",
        lambda: flash_mla_with_kvcache(step, plain, tables, lens, 512, plan, causal=True),
        lambda: decode(step, plain, **of_plain),
    )
    yield (
        "the same, queries in 8 bits, too",
        lambda: flash_mla_with_kvcache(step_f8, plain, tables, lens, 512, plan, causal=True),
        lambda: decode(step_f8.bfloat16(), plain, **of_plain),  # which takes no others
    )


def _of_deep_gemm(torch: Any) -> Iterator[Tuple]:
    from winnow import indexer
    from winnow.compat import deep_gemm

    q, keys = (torch.zeros(n, dtype=torch.float8_e4m3fn) for n in ((0, 64, 128), (64, 128)))
    weights, scale, lens = torch.zeros(0, 64), torch.zeros(64), torch.zeros(0, dtype=torch.int32)
    kv, pair = (keys, scale), (q, None)

    def scores(**options: Any) -> Any:
        return indexer.scores(
            q, keys, weights, k_scale=scale, key_start=lens, key_end=lens, **options
        )

    for name, given in (("fp8_mqa_logits", q), ("fp8_fp4_mqa_logits", pair)):
        function = getattr(deep_gemm, name)
        yield name, lambda f=function, q=given: f(q, kv, weights, lens, lens), scores
    yield (
        "the same, some columns",
        lambda: deep_gemm.fp8_fp4_mqa_logits(pair, kv, weights, lens, lens, 64),
        lambda: scores(clean=False, width=64),
    )
    step, of_step, tables = q[:, None], weights[:, None], torch.zeros(0, 2, dtype=torch.int32)
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    pages = cache.view(2, -1)

    def scores_paged() -> Any:
        return indexer.scores_paged(step, pages, of_step, tables, lens, 128, clean=False)

    for name, given in (("fp8_paged_mqa_logits", step), ("fp8_fp4_paged_mqa_logits", (step, None))):
        function = getattr(deep_gemm, name)
        call = lambda f=function, q=given: f(q, cache, weights, lens, tables, None, 128)  # noqa: E731
        yield name, call, scores_paged


def _calls(kind: str, module: Any) -> Iterator[Tuple]:
    q = module.zeros((0, 64, 576), dtype=module.float32)
    kv = module.zeros((16, 1, 576), dtype=module.float32)
    indices = module.zeros((0, 1, 64), dtype=module.int32)
    out = sparse_mla.forward(q, kv, indices)
    yield f"{kind}, new outputs", lambda: sparse_mla.forward(q, kv, indices)
    yield f"{kind}, out=", lambda: sparse_mla.forward(q, kv, indices, out=out)
    yield from _paged_calls(kind, module)
    yield from _all_to_all_calls(kind, module)
    if kind == "torch":
        from winnow.torch import sparse_mla_attention

        leaf = q.clone().requires_grad_()
        yield "torch operator", lambda: sparse_mla_attention(q, kv, indices)
        yield "torch operator, recorded", lambda: sparse_mla_attention(leaf, kv, indices)


def _paged_calls(kind: str, module: Any) -> Iterator[Tuple]:
    def zeros(*shape: int, dtype: Any = module.float32) -> Any:
        return module.zeros(shape, dtype=dtype)

    tables = zeros(0, 8, dtype=module.int32), zeros(0, dtype=module.int32)
    step = zeros(0, 16, 128), zeros(4, 16, 32, 16, 4), zeros(4, 16, 128, 16), zeros(16, 128)
    plain = (*step, zeros(0, 16, 128), None, *tables)
    fused = (*step, zeros(16, 128), zeros(16, 128, 128), None, *tables)
    out = zeros(0, 16, 128)
    what = "paged_xl::attention without sequences"
    yield f"{kind}, paged", lambda: paged_xl.attention(*plain), what
    yield f"{kind}, paged, out=", lambda: paged_xl.attention(*plain, out=out), what
    yield f"{kind}, paged, fused", lambda: paged_xl.attention_fused(*fused), what
    if kind == "torch":
        from winnow.torch import paged_xl_attention, paged_xl_attention_fused

        yield "torch operator, paged", lambda: paged_xl_attention(*plain), what
        yield "torch operator, paged, fused", lambda: paged_xl_attention_fused(*fused), what


def _all_to_all_calls(kind: str, module: Any) -> Iterator[Tuple]:
    world = expert_parallel.InProcessWorld(1)
    sizes = {"max_tokens": 1, "hidden": 16, "topk": 1, "experts": 1, "dtype": "float32"}
    with expert_parallel.AllToAll(world.transport(0), world.store(), **sizes) as layer:
        token = module.zeros((1, 16), dtype=module.float32)
        expert = module.zeros((1, 1), dtype=module.int32)
        got = layer.dispatch(token, expert)
        what = "expert_parallel, one token"
        yield f"{kind}, dispatch", lambda: layer.dispatch(token, expert), what
        yield f"{kind}, combine", lambda: layer.combine(got.output, got.descriptor), what
        if kind == "torch":
            from winnow.torch import expert_parallel_combine, expert_parallel_dispatch

            made = expert_parallel_dispatch(layer, token, expert)
            yield (
                "torch operator, dispatch",
                lambda: expert_parallel_dispatch(layer, token, expert),
                what,
            )
            yield (
                "torch operator, combine",
                lambda: expert_parallel_combine(layer, made.output, made.descriptor),
                what,
            )


def measure() -> List[Dict[str, Any]]:
    """The cost with every kind of tensor that is installed, as results of `winnow bench`."""
    results = []
    for kind in ("numpy", "torch"):
        try:
            module = importlib.import_module(kind)
        except ImportError:
            continue
        results += [_measure(*call) for call in _calls(kind, module)]
        if kind == "torch":
            results += _stand_ins()
    return results


def show(rows: List[Dict[str, Any]]) -> None:
    """Prints the table."""
    print("a call from Python that has next to nothing to do\n")
    for row in rows:
        verdict = "reached" if row["reached"] else "MISSED"
        print(
            f"{row['operation']}  {row['benchmark']:28}  {1e6 * row['seconds']:6.2f} us"
            f"  {1e6 * row['target_seconds']:4.1f} us {verdict}"
        )


def main(arguments: List[str]) -> int:
    """Prints the table; 1 if --check is given and a target is missed."""
    parser = argparse.ArgumentParser(prog="winnow bench python", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(arguments)
    rows = measure()
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    return 1 if options.check and not all(row["reached"] for row in rows) else 0
