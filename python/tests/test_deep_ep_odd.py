"""Odd arguments of winnow.compat.deep_ep: all ranks refuse them, and the next call works."""

import deep_ep_odd as odd
import pytest


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (odd.tokens, ()),
        (odd.experts, ()),
        (odd.elastic, (False,)),
        (odd.elastic, (True,)),
        (odd.low_latency, ()),
    ],
    ids=["tokens", "experts", "elastic", "expanded", "low-latency"],
)
def test_every_argument(deep_ep_pool, body, arguments):
    world = 2
    refused = []
    for outcomes in zip(*deep_ep_pool.run(world, body, *arguments), strict=True):
        what, texts = outcomes[0][0], {text for _, text, _ in outcomes}
        assert {after for _, _, after in outcomes} == {"it works"}, outcomes
        # Of what differs each rank names itself first.
        assert len(texts) == 1 or all(" differs: " in text for text in texts), outcomes
        text = texts.pop()
        if text != "it works":
            assert f"rank {world - 1}" in text and "Error" not in text, outcomes
            refused.append(what)
    assert len(refused) > 50
