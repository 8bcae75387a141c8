"""Models that see and hear: their towers run as under "sdpa", their text on Winnow."""

import pytest
import torch
from dsa_models import FAMILIES, make, tokens
from test_transformers import LOGITS, one_thread  # noqa: F401
from transformers import Dots3NoteConfig, Dots3NoteForConditionalGeneration

_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 64,
}  # fmt: skip
_AUDIO = {
    "whisper_config": {
        "d_model": 32, "encoder_attention_heads": 2, "encoder_layers": 2, "encoder_ffn_dim": 32,
    },
    "feature_size": 16, "downsample_hidden_size": 8, "whisper_adapter_in_dim": 32,
    "whisper_adapter_out_dim": 64,
}  # fmt: skip


@torch.no_grad()
def both(model, run, other="sdpa"):
    results = []
    for implementation in (other, "winnow"):
        model.set_attn_implementation(implementation)
        results.append(run())
    return results


def test_a_text_with_a_picture():
    model = make("mistral_large4")
    ids = tokens(1, 30)
    image = model.config.image_token_index
    ids[ids == image] = 3
    ids[0, 5:9] = image
    picture = {"pixel_values": torch.randn(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    want, got = both(model, lambda: model.model.get_image_features(**picture).pooler_output)
    assert torch.equal(got[0], want[0])
    assert model.model.vision_tower.config._attn_implementation == "winnow"
    want, got = both(model, lambda: model(input_ids=ids, **picture).logits)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)


def test_pictures_and_sounds_beside_layers_with_a_sliding_window():
    text = make("dots3_note").config
    config = Dots3NoteConfig(text_config=text.to_dict(), vision_config=_VISION, audio_config=_AUDIO)
    model = Dots3NoteForConditionalGeneration._from_config(config, attn_implementation="winnow")
    model.eval()
    ids = tokens()
    want, got = both(model, lambda: model(input_ids=ids).logits)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)

    sounds = torch.randn(2, 16, 64), torch.tensor([64 * 160, 40 * 160])
    tower = model.model.audio_tower
    want, got = both(model, lambda: tower(*sounds).pooler_output)
    assert torch.equal(got, want)
    patches = torch.randn(16, 3 * 14 * 14)
    tower = model.model.vision_tower
    want, got = both(model, lambda: tower(patches, torch.tensor([[1, 4, 4]])).pooler_output)
    assert torch.equal(got, want)


@pytest.mark.skipif("hy_v4_vl" not in FAMILIES, reason="transformers has it from 5.24 on")
def test_pictures_beside_a_sink_for_each_head():
    """Its text has no "sdpa"; a picture has two rows of two tokens, each with one for its end."""
    model = make("hy_v4_vl")
    torch.nn.init.normal_(model.model.vision_tower.patch_merger.image_newline)
    ids = tokens()
    types = torch.zeros_like(ids)
    ids[0, 5:11], types[0, 5:11] = model.config.image_token_id, 1
    grid = torch.tensor([[1, 4, 4]])
    picture = {"pixel_values": torch.randn(16, 3 * 4 * 4), "image_grid_thw": grid}
    mixed = {"": "eager", "text_config": "eager", "vision_config": "sdpa"}
    tower = model.model.vision_tower
    want, got = both(model, lambda: model.model.get_image_features(**picture).pooler_output, mixed)
    assert torch.equal(got[0], want[0]) and want[0].shape == (6, 64)
    assert tower.config._attn_implementation == "winnow"
    options = {"mm_token_type_ids": types, **picture}
    want, got = both(model, lambda: model(input_ids=ids, **options).logits, mixed)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options |= {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    want, got = both(model, lambda: model.generate(input_ids=ids, **options), mixed)
    assert torch.equal(got, want) and got.shape == (2, 46)
