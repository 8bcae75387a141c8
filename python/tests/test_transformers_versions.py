"""The older of the supported versions of transformers, which tools/setup unpacks beside the pinned
one: some cases of each family, in a process that finds it first."""

import os
import sys
from pathlib import Path

import beside
from processes import run
from winnow.transformers.registry import VERSIONS, version

CASES = (
    "test_transformers.py::test_loss_logits_and_every_gradient",
    "test_transformers.py::test_steps_with_a_cache",
    "test_transformers.py::test_the_original_is_what_is_compared_with",
    "test_transformers.py::test_what_is_supported",
    "test_transformers_towers.py",
)


def test_the_older_version():
    older, newer = VERSIONS
    assert version() == newer
    (unpacked,) = beside.versions("transformers")
    assert unpacked.startswith(older + ".")
    folder = beside.folder("transformers", unpacked)
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cases = [here / case for case in CASES]
    result = run(*command, *cases, add={"PYTHONPATH": path}, timeout=900, check=True)
    # Five families: the newer version has six.
    assert f"{5 * (3 + 2 + 1) + 1 + 2} passed" in result.stdout, result.stdout
