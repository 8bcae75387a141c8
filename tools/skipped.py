#!/usr/bin/env python3
"""Says why tests were skipped, and how many for each reason: `skipped.py NAME JUNIT_XML`, where the
file is what pytest or ctest wrote. Ends with 1 if the list lacks the reason of a test:
`make test` brings what its tests need, except for what a machine has or lacks."""

import re
import sys
import xml.etree.ElementTree as xml
from collections import Counter

# What a machine may lack, and how the tests say so.
REASONS = {
    "needs a CUDA GPU": r"no CUDA GPU|no CUDA driver|the CUDA driver "
    r"|this build has no (kernels for it|CUDA kernels)",
    "needs a GPU of another kind": r"compute capability|has no GPU for \w+$",
    "needs two CUDA GPUs": r"(needs|wants) two GPUs|one GPU only",
    "is for machines without a GPU": r"has a GPU$",
    "needs a GPU and CuPy": r"could not import 'cupy'",
    "needs nvcc and NVSHMEM": r"(built without|this build has no) NVSHMEM|NVSHMEM cannot be loaded",
    "needs the headers of CUDA": r"nor those of CUDA",
    "needs chromium (tools/setup browser)": r"has no chromium$",
    "needs apt and its lists": r"has no apt$|apt has no lists",
    "needs root": r"only root can",
    "is for users other than root": r"root can read everything$",
    "needs more memory": r"too little memory|no address range of|the size of stacks is limited",
    "needs a static libstdc++": r"built without tests, or by a compiler that has no static libstdc",
    "needs the repository": r"no repository$",
    "is started by another test": r"^disabled$",
    "does not apply to a GPU": r"the other ranks hear of it in a later call$",
    "does not apply where WINNOW_CPU_ISA is set": r"WINNOW_CPU_ISA is set$",
}


def text_of(case):
    """What the test itself said, or None where it ran."""
    if case.get("status") == "disabled":
        return "disabled"
    skipped = case.find("skipped")
    if skipped is None:
        return None
    if case.get("status") != "notrun":  # pytest
        message = skipped.get("message", "")
        return message if message != "collection skipped" else skipped.text
    output = case.findtext("system-out", "")
    said = re.search(r"^\S+: Skipped\n(.*)|SKIPPED: (.*)", output, re.MULTILINE)
    return (said[1] or said[2]) if said else skipped.get("message", "")


def main(name, path):
    counts, unlisted = Counter(), []
    for case in xml.parse(path).iter("testcase"):
        text = text_of(case)
        if text is None:
            continue
        text = text.strip()
        for reason, pattern in REASONS.items():
            if re.search(pattern, text):
                counts[reason] += 1
                break
        else:
            unlisted.append(f"{case.get('classname')}.{case.get('name')}: {text}")
    for reason, count in counts.most_common():
        print(f"{name}: {count} skipped: {reason}")
    for line in unlisted:
        print(f"{name}: must not be skipped: {line}")
    return bool(unlisted)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
