"""The build backend: scikit-build-core's, which of a checkout takes what git tracks and nothing else.

By itself it takes every file that .gitignore does not name: notes, keys, what a program left behind.
"""

import re
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import (  # noqa: F401  (the other hooks)
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

_OF_THE_PROJECT_ALONE = ["/.ci/", "/.github/"]


def _untracked():
    """What git does not track, as patterns of .gitignore; of an unpacked sdist nothing."""
    if not Path(".git").exists():
        return []
    command = ["git", "ls-files", "--others", "--directory", "-z"]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    names = [name for name in listed.decode(errors="surrogateescape").split("\0") if name]
    return ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name) for name in names]


def _limited(settings):
    return {**(settings or {}), "sdist.exclude": _OF_THE_PROJECT_ALONE + _untracked()}


def build_sdist(sdist_directory, config_settings=None):
    return build.build_sdist(sdist_directory, _limited(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    try:
        config_settings = _limited(config_settings)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"winnow: the wheel may hold files that git does not track: {error}", file=sys.stderr)
    return build.build_wheel(wheel_directory, config_settings, metadata_directory)
