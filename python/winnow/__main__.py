"""``python -m winnow``: the command line program that the wheel brings.

``bench`` shows more: after the operations, and alone with ``bench python``, what a call
from Python costs; and with ``bench transformers`` a layer of a model, with ``bench
context_parallel`` one whose sequence several ranks share.
``compat-path`` prints the folder for PYTHONPATH with the package that stands for deep_ep.
"""

import argparse
import difflib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, List

from winnow import nvshmem

_PROGRAM = Path(__file__).parent / "bin" / "winnow"


def _bench(arguments: List[str]) -> int:
    """`winnow bench`, and the cost of a call from Python unless one operation is asked for."""
    # Of the program's options only what is needed to see whether everything is asked for.
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("operation", nargs="?")
    for option in ("--name", "--device", "--backend", "--seconds", "--repetitions"):
        parser.add_argument(option)
    for option in ("--check", "--json", "--help"):
        parser.add_argument(option, action="store_true")
    options, _ = parser.parse_known_args(arguments)
    command = [str(_PROGRAM), "bench", *arguments]
    if options.operation or options.name or options.help:
        return subprocess.call(command)
    result = subprocess.run(command, stdout=subprocess.PIPE if options.json else None, text=True)
    if result.returncode not in (0, 1):
        return result.returncode
    from winnow import call_cost

    rows = call_cost.measure()
    if options.json:
        report = json.loads(result.stdout)
        report["results"] += rows
        print(json.dumps(report, indent=2))
    else:
        print()
        call_cost.show(rows)
    missed = options.check and not all(row["reached"] for row in rows)
    return 1 if missed else result.returncode


# What there is from Python alone, as the program shows its own.
_HELP = """
From Python also:
  python -m winnow bench python         what a call from Python costs
  python -m winnow bench transformers   a layer of a model of Hugging Face transformers
  torchrun --nproc-per-node N -m winnow bench context_parallel
                                        the same layer, its sequence on N ranks
  python -m winnow compat-path          the folder for PYTHONPATH that stands for deep_ep
  python -m winnow.compat --help        such folders by name, and which calls of a package they take
"""


def _help(arguments: List[str]) -> int:
    """The help of the program, and what Python adds: on standard error where nothing asked."""
    code = subprocess.call([str(_PROGRAM), *arguments])
    print(_HELP, end="", file=sys.stdout if arguments else sys.stderr)
    return code


def _refused(text: str) -> int:
    """The exit code of bad usage, which the text describes."""
    print(text, file=sys.stderr)
    return 2


def _refuse_if_nearest(given: str, known: List[str], argument: str) -> None:
    """Ends the process where a word that Python does not know is like one that it does."""
    # No less like it: expert_parallel, which the program knows, is a little like context_parallel.
    if near := difflib.get_close_matches(given, known, 1, 0.8):
        text = (
            f'winnow: {argument}: want {" or ".join(known)}, got "{given}"; did you mean {near[0]}?'
        )
        sys.exit(_refused(text))


def _printing(command: Callable[[List[str]], int], arguments: List[str]) -> int:
    """The exit code of a command that prints from Python: 4, as of the program, where standard
    output is closed or cannot be written."""
    try:
        code = command(arguments)
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.flush()
        return code
    except OSError as error:
        if error.filename is not None:  # another file than standard output
            raise
        text = f"winnow: standard output: the output is incomplete: {error.strerror}"
        print(text, file=sys.stderr, flush=True)
        os._exit(4)  # the interpreter's own end would flush, and fail, once more


def main() -> None:
    """Becomes the program `winnow` with this process's arguments."""
    if sys.argv[1:3] == ["bench", "python"]:
        from winnow import call_cost

        sys.exit(_printing(call_cost.main, sys.argv[3:]))
    if sys.argv[1:3] == ["bench", "transformers"]:
        from winnow.transformers import bench

        sys.exit(_printing(bench.main, sys.argv[3:]))
    if sys.argv[1:3] == ["bench", "context_parallel"]:
        from winnow.transformers import bench_ranks

        sys.exit(_printing(bench_ranks.main, sys.argv[3:]))
    if sys.argv[1:2] == ["compat-path"]:
        from winnow import compat

        if sys.argv[2:]:
            sys.exit(_refused(f'winnow: compat-path: want no argument, got "{sys.argv[2]}"'))
        sys.exit(_printing(lambda arguments: print(compat.path()) or 0, sys.argv[2:]))
    if sys.argv[1:2]:
        _refuse_if_nearest(sys.argv[1], ["compat-path"], "command")
    if sys.argv[1:2] == ["bench"] and sys.argv[2:3]:
        known = ["python", "transformers", "context_parallel"]
        _refuse_if_nearest(sys.argv[2], known, "bench: operation")
    if not _PROGRAM.exists():
        sys.exit("winnow: this package was built without the command line program")
    if folder := nvshmem.folder():
        os.environ["NVSHMEM_HOME"] = os.path.dirname(folder)  # the program knows no sys.path
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        sys.exit(_printing(_help, sys.argv[1:]))
    if sys.argv[1:2] == ["bench"]:
        sys.exit(_printing(_bench, sys.argv[2:]))
    os.execv(_PROGRAM, ["winnow", *sys.argv[1:]])


if __name__ == "__main__":
    main()
