"""Tiny models with random weights, in memory or as folders that SGLang and transformers load.

    folder = save(tiny_llama(seed=1), tmp_path / "llama")
    python -m sglang.launch_server --model-path FOLDER --dtype float32 --device cpu ...

The weights are scaled so that attention is neither flat nor one-hot and greedy text does not fall
into a loop at once: a token that is wrongly seen or missed changes the logits by far more than
rounding does. Any token may be drawn, the end of text too: ask a server for ``ignore_eos``.

The tokenizer is one word a token, ``w8`` .. ``w255``, so text and token ids say the same. Running
with ``--skip-tokenizer-init`` works as well.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tangram_sglang.score import QueryStats
from tangram_sglang.score.gate import Gates
from tests.reference.model import frequencies, sliding_window

VOCAB = 256
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD = len(SPECIAL)
MAX_POSITIONS = 4096

CHAT_TEMPLATE = (
    "<s>{% for m in messages %} <|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %} <|assistant|>{% endif %}"
)


def tiny_llama(
    *,
    seed=0,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=MAX_POSITIONS,
    vocab=VOCAB,
    pad=PAD,
    bos=BOS,
    eos=EOS,
) -> LlamaForCausalLM:
    """``q_heads=9, kv_heads=3`` has the head counts of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=q_heads * head_dim,
        intermediate_size=2 * q_heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        attn_implementation="eager",
        dtype="float32",
    )
    return _with_random_weights(LlamaForCausalLM(config), seed)


def tiny_qwen3(*, seed=0, layers=2, q_heads=4, kv_heads=2, head_dim=16) -> Qwen3ForCausalLM:
    """Normalises queries and keys before RoPE; the weights of both norms are 3."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=q_heads * head_dim,
        intermediate_size=2 * q_heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="eager",
        dtype="float32",
    )
    model = _with_random_weights(Qwen3ForCausalLM(config), seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(3.0)
            layer.self_attn.k_norm.weight.fill_(3.0)
    return model


def tiny_gemma3(
    *,
    seed=0,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    sliding_window=8,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=MAX_POSITIONS,
) -> Gemma3ForCausalLM:
    """``sliding_window`` counts the tokens a query sees, itself included."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=q_heads * head_dim,
        intermediate_size=2 * q_heads * head_dim,
        num_hidden_layers=len(layer_types),
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=sliding_window,
        layer_types=list(layer_types),
        max_position_embeddings=max_positions,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="eager",
        dtype="float32",
    )
    return _with_random_weights(Gemma3ForCausalLM(config), seed)


def tiny_gpt_oss(
    *,
    seed=0,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    sliding_window=8,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
) -> GptOssForCausalLM:
    """Attention sinks, YaRN and two of four experts a token."""
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=q_heads * head_dim,
        intermediate_size=q_heads * head_dim,
        num_hidden_layers=len(layer_types),
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=sliding_window,
        layer_types=list(layer_types),
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 32,
        },
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="eager",
        dtype="float32",
    )
    model = _with_random_weights(GptOssForCausalLM(config), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            # large enough to take half of many a softmax; SGLang holds sinks in bfloat16
            sinks = 2 + 2 * torch.randn(q_heads, generator=generator)
            layer.self_attn.sinks.copy_(sinks.bfloat16())
    return model


def save(model, folder: str | Path) -> Path:
    """Write config.json, float32 safetensors and the tokenizer."""
    folder = Path(folder)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *(f"w{i}" for i in range(FIRST_WORD, VOCAB))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def random_tokens(n: int, seed: int = 0) -> list[int]:
    """``n`` words, no special token among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCAB, (n,), generator=generator).tolist()


def random_query_stats(model, *, seed=0, rank=3) -> QueryStats:
    """Made-up query statistics of every full-attention head, with the model's RoPE and scaling."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    layers = [x for i, x in enumerate(model.model.layers) if sliding_window(config, i) is None]
    heads = len(layers) * config.num_key_value_heads
    ratio = config.num_attention_heads // config.num_key_value_heads
    shape = (heads, ratio, config.head_dim)
    return QueryStats(
        mean=torch.randn(shape, generator=generator),
        factor=torch.randn(*shape, rank, generator=generator) / rank**0.5,
        diagonal=torch.rand(shape, generator=generator),
        inv_freq=frequencies(model).repeat(heads, 1),
        scaling=torch.full((heads,), layers[0].self_attn.scaling),
    )


def random_gates(model, *, seed=0, dim=5, sinks=3) -> Gates:
    """Made-up gates of every full-attention layer, in bfloat16 as a gate file holds them."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    layers = sum(sliding_window(config, i) is None for i in range(config.num_hidden_layers))
    heads, hidden = config.num_key_value_heads, config.hidden_size
    ratio = config.num_attention_heads // heads

    def normal(*shape):
        return torch.randn(layers, *shape, generator=generator).bfloat16()

    return Gates(
        q=normal(heads, ratio, dim, hidden),
        k=normal(heads, dim, hidden),
        q_norm=1 + 0.3 * normal(dim),
        k_norm=1 + 0.3 * normal(dim),
        sinks=normal(heads, sinks, dim),
        bias=normal(heads, ratio),
    )


@torch.no_grad()
def _with_random_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(0.1 * noise)
        elif weight.ndim == 1:
            weight.add_(0.1 * noise)
        elif "embed_tokens" in name:
            weight.copy_(0.25 * noise / weight.shape[1] ** 0.5)
        else:
            gain = 2.0 if "q_proj" in name or "lm_head" in name else 1.0
            weight.copy_(gain * noise / weight.shape[1] ** 0.5)
    if model.config.tie_word_embeddings:
        # makes up for the small embeddings, which keep a token from repeating itself
        model.model.norm.weight.add_(7.0)
    return model.eval()
