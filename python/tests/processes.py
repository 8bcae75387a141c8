"""Programs that a test starts and waits for, and what they print."""

import os
import runpy
import subprocess
import sys

ONE_THREAD = {"OMP_NUM_THREADS": "1", "WINNOW_NUM_THREADS": "1"}  # quicker for small problems


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
    monkeypatch.setattr(sys, "argv", [program.name, *map(str, arguments)])
    return runpy.run_path(str(program), run_name="__main__")
