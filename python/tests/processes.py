"""Programs that a test starts and waits for."""

import subprocess


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=250, **options
    )
