"""What a call from Python costs beyond the call in C++: ``python -m winnow bench python``.

The same call is repeated from Python and inside C++, on a problem without queries, where the
library checks its arguments and computes nothing; the difference is the cost of the binding. Each
figure is the smallest of many short runs: what the code costs, not what else the machine does.
"""

import argparse
import json
import sys
import time
from typing import Any, Callable, Dict, List

from winnow import _winnow, sparse_mla

_CALLS = 200
_RUNS = 200

LIMIT_PLAIN = 10.0
"""Microseconds that a call may cost beyond C++."""
LIMIT_OPERATOR = 25.0
"""The same through the torch operator."""


def _seconds_of_call(call: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / _CALLS)
    return best


def _measure(name: str, limit: float, call: Callable[[], Any]) -> Dict[str, Any]:
    call()
    native = min(_winnow.time_native(_CALLS, call) for _ in range(_RUNS))
    cost = 1e6 * (_seconds_of_call(call) - native)
    return {
        "call": name,
        "microseconds": round(cost, 2),
        "native_microseconds": round(1e6 * native, 2),
        "target": limit,
        "reached": cost <= limit,
    }


def _problem(module: Any) -> List[Any]:
    return [
        module.zeros((0, 64, 576), dtype=module.float32),
        module.zeros((16, 1, 576), dtype=module.float32),
        module.zeros((0, 1, 64), dtype=module.int32),
    ]


def measure() -> List[Dict[str, Any]]:
    """The cost of sparse_mla.forward with every kind of tensor that is installed."""
    results = []
    for kind in ("numpy", "torch"):
        try:
            module = __import__(kind)
        except ImportError:
            continue
        arguments = _problem(module)
        out = sparse_mla.forward(*arguments)
        results.append(
            _measure(
                f"{kind}, new outputs", LIMIT_PLAIN, lambda a=arguments: sparse_mla.forward(*a)
            )
        )
        results.append(
            _measure(
                f"{kind}, out=",
                LIMIT_PLAIN,
                lambda a=arguments, o=out: sparse_mla.forward(*a, out=o),
            )
        )
        if kind == "torch":
            from winnow import torch as operators

            results.append(
                _measure(
                    "torch operator",
                    LIMIT_OPERATOR,
                    lambda a=arguments: operators.sparse_mla_attention(*a),
                )
            )
    return results


def main(arguments: List[str]) -> int:
    """Prints the table; 1 if --check is given and a target is missed."""
    parser = argparse.ArgumentParser(prog="winnow bench python", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(arguments)
    results = measure()
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    else:
        print("sparse_mla::forward from Python, microseconds beyond the call in C++\n")
        for row in results:
            verdict = "reached" if row["reached"] else "MISSED"
            print(
                f"{row['call']:20} {row['microseconds']:8.2f}"
                f"   C++ {row['native_microseconds']:.2f}   target {row['target']:.0f} {verdict}"
            )
    return 1 if options.check and not all(row["reached"] for row in results) else 0
