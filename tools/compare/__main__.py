"""Winnow beside other libraries' kernels: python tools/compare sparse_mla::forward

Other libraries are used where they are installed, and named where they are not. Both sides get
the same inputs in one process; results are compared before anything is timed, and then all sides
run in turn, in random order, a bf16 product of cuBLAS among them. The medians are printed.
"""

import argparse
import importlib
import json
import sys

import torch
from runner import World, find, lines, measure, missing, report

FAMILIES = ("sparse_mla", "indexer", "expert_parallel")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("tools/compare", description=__doc__)
    parser.add_argument("operation", help=f"an operation, or a family: {', '.join(FAMILIES)}")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--name", default="", help="only benchmarks whose names contain this")
    parser.add_argument("--repetitions", type=int, default=7, help="turns; the median is reported")
    parser.add_argument("--seconds", type=float, default=0.1, help="measured time of a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    family = options.operation.split("::")[0]
    if family not in FAMILIES:
        parser.error(f"operation: wanted one of {', '.join(FAMILIES)}, got {options.operation!r}")
    operations = importlib.import_module(family).OPERATIONS
    if options.operation != family:
        if options.operation not in operations:
            parser.error(f"operation: wanted one of {', '.join(operations)}")
        operations = {options.operation: operations[options.operation]}
    options.operations, options.family = operations, family
    return options


def main() -> int:
    """0; 1 if a peer failed or computes something else; 3 if none is installed."""
    options = parse()
    wanted = sorted({name for _, names in options.operations.values() for name in names})
    absent = [name for name in wanted if find(name) is None]
    for name in absent:
        print(f"compare: {missing(name)}", file=sys.stderr)
    if absent == wanted:
        return 3
    device = torch.device(options.device)
    if distributed := options.family == "expert_parallel":
        where = importlib.import_module(options.family).world(device)
    else:
        where = World(device)
    speaks = not distributed or where.group.rank() == 0
    results = []
    for problems, names in options.operations.values():
        if all(name in absent for name in names):
            continue
        for problem in problems(where if distributed else device):
            if options.name not in problem.benchmark or not problem.peers:
                continue
            results.append(measure(problem, where, options.repetitions, options.seconds))
            if speaks and not options.json:
                print("\n".join(lines(results[-1])), flush=True)
    if speaks and options.json:
        print(json.dumps(report(results, where, options.repetitions), indent=2))
    if distributed:
        torch.distributed.destroy_process_group()
    return int(any("error" in peer for result in results for peer in result["peers"]))


if __name__ == "__main__":
    sys.exit(main())
