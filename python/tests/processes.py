"""Programs that a test starts and waits for, and what they print."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "WINNOW_NUM_THREADS": "1"}  # quicker for small problems

# Its processes come from one that has imported what takes seconds, and nothing of ours.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.modeling_utils"])


def run(*command, add=None, check=False, **options):
    """`add`: variables beside those of this process; `check`: it must succeed."""
    if add is not None:
        options["env"] = {**os.environ, **add}
    options = {"capture_output": True, "text": True, "timeout": 250, **options}
    result = subprocess.run([str(part) for part in command], **options)
    assert not check or result.returncode == 0, f"{result.stdout}{result.stderr}"
    return result


def python(*arguments, **options):
    """With the Python that runs the tests."""
    return run(sys.executable, *arguments, **options)


def run_here(monkeypatch, program, *arguments):
    """A program in Python in this process, which has imported torch before."""
    monkeypatch.setattr(sys, "argv", [])
    execute(str(program), *map(str, arguments))


def forked(*command, path=(), add=None, check=False):
    """As python(*command), in a process of FORKS. `path`: what precedes the sys.path of this one;
    `add` and `check` as run() has them."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **(add or {})}
        given = folder, variables, list(map(str, path)), *map(str, command)
        process = FORKS.Process(target=_serve, args=given)
        process.start()
        process.join(900)
        process.kill()
        printed = [(Path(folder) / name).read_text() for name in ("1", "2")]
    assert not check or process.exitcode == 0, "".join(printed)
    return subprocess.CompletedProcess(command, process.exitcode, *printed)


def _serve(folder, variables, path, *command):
    for descriptor in (1, 2):
        os.dup2(os.open(f"{folder}/{descriptor}", os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.update(variables)
    sys.path[:0] = path
    execute(*command)


def execute(*command):
    """As Python with these arguments: -c or -m and a program, or its file, and its arguments."""
    sys.argv = list(command[command[0] in ("-c", "-m") :])
    if command[0] == "-c":
        exec(command[1], {"__name__": "__main__"})
    elif command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
