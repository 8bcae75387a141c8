"""Programs that a test starts and waits for, and what they print."""

import os
import subprocess
import sys


def run(*command, add=None, **options):
    """`add`: variables beside those of this process."""
    if add is not None:
        options["env"] = {**os.environ, **add}
    options = {"capture_output": True, "text": True, "timeout": 250, **options}
    return subprocess.run([str(part) for part in command], **options)


def python(*arguments, **options):
    """With the Python that runs the tests."""
    return run(sys.executable, *arguments, **options)
