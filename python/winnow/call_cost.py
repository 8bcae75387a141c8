"""The cost of a call from Python: ``python -m winnow bench python``.

Calls without queries (sparse_mla) or sequences (paged_xl), or with one token on one rank
(expert_parallel), so that the library does next to nothing. Functions of winnow.compat are compared
with the functions that they call. Each figure is the smallest of many short runs: what the code
costs, not what else the machine does.
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


def _seconds_of_call(call: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return best


def _measure(
    name: str,
    limit: float,
    call: Callable[[], Any],
    what: str = "sparse_mla::forward without queries",
) -> Dict[str, Any]:
    call()
    cost = _seconds_of_call(call)
    return {
        "operation": "python",
        "benchmark": name,
        "shape": what,
        "seconds": cost,
        "target_seconds": limit,
        "reached": cost <= limit,
    }


def _stand_ins() -> Iterator[Dict[str, Any]]:
    """The functions of winnow.compat for torch, beside those that they call."""
    import torch

    from winnow import indexer
    from winnow.compat import deep_gemm, flash_mla

    def zeros(*shape: int, dtype: Any = torch.int32) -> Any:
        return torch.zeros(shape, dtype=dtype)

    bf16, f8, plan = torch.bfloat16, torch.float8_e4m3fn, flash_mla.get_mla_metadata()[0]
    q, kv, rows = zeros(0, 64, 576, dtype=bf16), zeros(16, 1, 576, dtype=bf16), zeros(0, 1, 64)
    step, steps, cache = (
        q[:, None],
        zeros(0, 2, 64, 576, dtype=bf16),
        zeros(2, 64, 1, 576, dtype=bf16),
    )
    cache_f8, tables, lens = zeros(2, 64, 1, 656, dtype=torch.uint8), zeros(0, 2), zeros(0)
    of_steps, dense = zeros(0, 2), {"format": "bf16", "batch_invariant": False}
    v4, cache_v4 = zeros(0, 1, 64, 512, dtype=bf16), zeros(1, 64, 1, 584, dtype=torch.uint8)
    extra = {"topk_length": lens, "attn_sink": torch.zeros(64), "extra_topk_length": lens}
    of_v4 = {"format": "fp8_584", "extra_cache": cache_v4, "extra_indices": rows, **extra}
    v4_of_flash_mla = {"extra_k_cache": cache_v4, "extra_indices_in_kvcache": rows, **extra}
    queries, keys, scale = zeros(0, 64, 128, dtype=f8), zeros(64, 128, dtype=f8), torch.zeros(64)
    weights, paged = torch.zeros(0, 64), zeros(2, 64, 1, 132, dtype=torch.uint8)
    of_step, pages = queries[:, None], paged.view(2, -1)

    def decode(*given: Any, **options: Any) -> Any:
        return lambda: flash_mla.flash_mla_with_kvcache(*given, **options)

    def scores() -> Any:
        return indexer.scores(queries, keys, weights, k_scale=scale, key_start=lens, key_end=lens)

    def scores_paged() -> Any:
        return indexer.scores_paged(of_step, pages, weights[:, None], tables, lens, 128)

    of_keys, of_paged = (
        ((keys, scale), weights, lens, lens),
        (paged, weights, lens, tables, None, 128),
    )
    for name, call, plain in (
        (
            "flash_mla_sparse_fwd",
            lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1),
            lambda: sparse_mla.forward(q, kv, rows, scale=0.1),
        ),
        (
            "flash_mla_with_kvcache",
            decode(step, cache_f8, None, None, 512, plan, is_fp8_kvcache=True, indices=rows),
            lambda: sparse_mla.decode(step, cache_f8, rows),
        ),
        (
            "flash_mla_with_kvcache, V4",
            decode(
                v4, cache_v4, None, None, 512, plan, is_fp8_kvcache=True, indices=rows,
                **v4_of_flash_mla,
            ),
            lambda: sparse_mla.decode(v4, cache_v4, rows, **of_v4),
        ),
        (
            "flash_mla_with_kvcache, dense",
            decode(step, cache, tables, lens, 512, plan),
            lambda: sparse_mla.decode(step, cache, block_tables=tables, context_lens=lens, **dense),
        ),
        (
            "the same, of two queries",
            decode(steps, cache, tables, lens, 512, plan),
            lambda: sparse_mla.decode(
                steps, cache, block_tables=tables, context_lens=of_steps, **dense
            ),
        ),
        (
            "fp8_mqa_logits",
            lambda: deep_gemm.fp8_mqa_logits(queries, *of_keys),
            scores,
        ),
        (
            "fp8_fp4_mqa_logits",
            lambda: deep_gemm.fp8_fp4_mqa_logits((queries, None), *of_keys),
            scores,
        ),
        (
            "fp8_paged_mqa_logits",
            lambda: deep_gemm.fp8_paged_mqa_logits(of_step, *of_paged),
            scores_paged,
        ),
        (
            "fp8_fp4_paged_mqa_logits",
            lambda: deep_gemm.fp8_fp4_paged_mqa_logits((of_step, None), *of_paged, None),
            scores_paged,
        ),
    ):  # fmt: skip
        cost = _seconds_of_call(call) - _seconds_of_call(plain)
        yield {
            "operation": "python",
            "benchmark": name,
            "shape": "without queries, beyond the operation's own function",
            "seconds": cost,
            "target_seconds": LIMIT_STAND_IN,
            "reached": cost <= LIMIT_STAND_IN,
        }


def _calls(kind: str, module: Any) -> Iterator[Tuple]:
    q = module.zeros((0, 64, 576), dtype=module.float32)
    kv = module.zeros((16, 1, 576), dtype=module.float32)
    indices = module.zeros((0, 1, 64), dtype=module.int32)
    out = sparse_mla.forward(q, kv, indices)
    yield f"{kind}, new outputs", LIMIT_PLAIN, lambda: sparse_mla.forward(q, kv, indices)
    yield f"{kind}, out=", LIMIT_PLAIN, lambda: sparse_mla.forward(q, kv, indices, out=out)
    yield from _paged_calls(kind, module)
    yield from _all_to_all_calls(kind, module)
    if kind == "torch":
        from winnow.torch import sparse_mla_attention

        leaf = q.clone().requires_grad_()
        yield "torch operator", LIMIT_OPERATOR, lambda: sparse_mla_attention(q, kv, indices)
        yield (
            "torch operator, recorded",
            LIMIT_OPERATOR,
            lambda: sparse_mla_attention(leaf, kv, indices),
        )


def _paged_calls(kind: str, module: Any) -> Iterator[Tuple]:
    def zeros(*shape: int, dtype: Any = module.float32) -> Any:
        return module.zeros(shape, dtype=dtype)

    tables = zeros(0, 8, dtype=module.int32), zeros(0, dtype=module.int32)
    step = zeros(0, 16, 128), zeros(4, 16, 32, 16, 4), zeros(4, 16, 128, 16), zeros(16, 128)
    plain = (*step, zeros(0, 16, 128), None, *tables)
    fused = (*step, zeros(16, 128), zeros(16, 128, 128), None, *tables)
    out = zeros(0, 16, 128)
    what = "paged_xl::attention without sequences"
    yield f"{kind}, paged", LIMIT_PLAIN, lambda: paged_xl.attention(*plain), what
    yield f"{kind}, paged, out=", LIMIT_PLAIN, lambda: paged_xl.attention(*plain, out=out), what
    yield f"{kind}, paged, fused", LIMIT_PLAIN, lambda: paged_xl.attention_fused(*fused), what
    if kind == "torch":
        from winnow.torch import paged_xl_attention, paged_xl_attention_fused

        yield "torch operator, paged", LIMIT_OPERATOR, lambda: paged_xl_attention(*plain), what
        yield (
            "torch operator, paged, fused",
            LIMIT_OPERATOR,
            lambda: paged_xl_attention_fused(*fused),
            what,
        )


def _all_to_all_calls(kind: str, module: Any) -> Iterator[Tuple]:
    world = expert_parallel.InProcessWorld(1)
    sizes = {"max_tokens": 1, "hidden": 16, "topk": 1, "experts": 1, "dtype": "float32"}
    with expert_parallel.AllToAll(world.transport(0), world.store(), **sizes) as layer:
        token = module.zeros((1, 16), dtype=module.float32)
        expert = module.zeros((1, 1), dtype=module.int32)
        got = layer.dispatch(token, expert)
        what = "expert_parallel, one token"
        yield f"{kind}, dispatch", LIMIT_PLAIN, lambda: layer.dispatch(token, expert), what
        yield (
            f"{kind}, combine",
            LIMIT_PLAIN,
            lambda: layer.combine(got.output, got.descriptor),
            what,
        )
        if kind == "torch":
            yield from _all_to_all_operators(layer, token, expert, what)


def _all_to_all_operators(layer: Any, token: Any, expert: Any, what: str) -> Iterator[Tuple]:
    from winnow.torch import expert_parallel_combine, expert_parallel_dispatch

    made = expert_parallel_dispatch(layer, token, expert)
    yield (
        "torch operator, dispatch",
        LIMIT_OPERATOR,
        lambda: expert_parallel_dispatch(layer, token, expert),
        what,
    )
    yield (
        "torch operator, combine",
        LIMIT_OPERATOR,
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
