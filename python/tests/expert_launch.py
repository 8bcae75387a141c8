"""How the tests of EPAll2AllLayer start processes, or are one."""

import re
from pathlib import Path

import pytest
import torch
from winnow.distributed import finalize_distributed

HERE = Path(__file__).parent


def documented_program(launcher):
    """The one of docs/python.md for "torchrun" or "launch", for any number of ranks; and the output
    that stands below, if any does."""
    text = (HERE.parents[1] / "docs" / "python.md").read_text()
    example = rf"```python {launcher}\n(.*?)```\n\n```sh\n[^`]*```\n(?:\n```text\n(.*?)```)?"
    ((program, output),) = re.findall(example, text, re.DOTALL)
    return program, output


@pytest.fixture
def alone(monkeypatch):
    """A process that nobody launched, with torch's settings as before afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    state = torch.get_rng_state()
    yield
    finalize_distributed()
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_rng_state(state)
