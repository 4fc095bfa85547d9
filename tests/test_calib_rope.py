"""RoPE frequencies read off SGLang's own modules, against the tables the model multiplies by."""

import pytest
import torch
from torch import nn

from tangram_sglang.errors import TangramError

FAR = 8192 + 512
# within the rounding of an fp32 product at that position
LIMIT = 1e-3

SCALINGS = {
    "plain": {"base": 100_000},
    "half the dimensions": {"base": 10_000, "partial_rotary_factor": 0.5},
    "linear": {"base": 10_000, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"base": 10_000, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {
        "base": 500_000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "base": 1_000_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
}


@pytest.fixture(scope="module")
def sglang():
    """SGLang's modules, on a platform of ours that runs on any CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGRAM_CPU_PLATFORM", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        from tangram_sglang.backend.rope import rotary_frequencies

        class Owner(nn.Module):
            def __init__(self, layer_id, rotary_emb, sliding_window_size=-1):
                super().__init__()
                if rotary_emb != "nothing":
                    self.rotary_emb = rotary_emb
                self.attn = RadixAttention(
                    2, 64, 0.125, 1, layer_id, sliding_window_size=sliding_window_size
                )

        def rope(**kwargs):
            kwargs = {"is_neox_style": True, "dtype": torch.float32, **kwargs}
            return get_rope(64, 64, 16384, **kwargs)

        def read(*owners):
            return rotary_frequencies(nn.ModuleList(owners))

        yield type(
            "SGLang", (), {"Owner": Owner, "rope": staticmethod(rope), "read": staticmethod(read)}
        )


def worst_angle(frequencies, table):
    """Largest distance to the table's points on the unit circle, [0, FAR]."""
    positions = torch.arange(0, FAR, 37)
    cos, sin = table[positions].double().chunk(2, dim=-1)
    length = torch.hypot(cos, sin)
    angle = positions[:, None].double() * frequencies
    return torch.hypot(angle.cos() - cos / length, angle.sin() - sin / length).max().item()


@pytest.mark.parametrize("kwargs", SCALINGS.values(), ids=SCALINGS)
def test_angles_are_those_of_the_served_table_far_out(sglang, kwargs):
    rope = sglang.rope(**kwargs)
    table = rope._compute_cos_sin_cache()
    found = sglang.read(sglang.Owner(0, rope))[0]
    assert found.dtype == torch.float64
    assert worst_angle(found, table) < LIMIT


def test_a_table_in_half_precision_is_made_again(sglang):
    rope = sglang.rope(base=20_000)
    exact = sglang.read(sglang.Owner(0, rope))[0]
    rope.cos_sin_cache = rope.cos_sin_cache.to(torch.bfloat16)
    assert worst_angle(sglang.read(sglang.Owner(0, rope))[0], rope._compute_cos_sin_cache()) < LIMIT
    torch.testing.assert_close(sglang.read(sglang.Owner(0, rope))[0], exact)


def test_a_half_precision_table_of_another_rotation_is_refused(sglang):
    rope = sglang.rope(base=30_000)
    other = sglang.rope(base=40_000).cos_sin_cache
    rope.cos_sin_cache = other.to(torch.bfloat16)
    with pytest.raises(TangramError, match=r"layer 7: .* away from what it computes"):
        sglang.read(sglang.Owner(7, rope))


def test_layers_without_rope_have_frequencies_of_zero(sglang):
    rope = sglang.rope(base=100_000)
    found = sglang.read(sglang.Owner(0, rope), sglang.Owner(1, None))
    assert found[0][0].item() == pytest.approx(1.0)
    assert found[1].tolist() == [0.0] * 32


def test_sliding_window_layers_are_left_out(sglang):
    rope = sglang.rope(base=100_000, is_neox_style=False)
    assert sglang.read(sglang.Owner(0, rope, sliding_window_size=31)) == {}


@pytest.mark.parametrize(
    ("emb", "message"),
    [
        pytest.param("interleaved", "layer 3: .*is_neox_style", id="not neox"),
        pytest.param("nothing", "layer 3: Owner has no attribute rotary_emb", id="no rotary_emb"),
        pytest.param(nn.Identity(), "layer 3: Identity has no table cos_sin_cache", id="no table"),
    ],
)
def test_other_rotations_are_refused_by_name(sglang, emb, message):
    if emb == "interleaved":
        emb = sglang.rope(base=100_000, is_neox_style=False)
    with pytest.raises(TangramError, match=message):
        sglang.read(sglang.Owner(3, emb))
