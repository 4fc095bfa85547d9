"""`tangram train-gate`: trains the gates that scorer fastkvzip reads, for one model.

Has the model repeat texts, notes how much attention each cached key gets meanwhile (KVzip's score),
and fits a gate for each layer that says so from the hidden state alone. A run that was killed goes on
where it was when it is asked for again.
"""

import argparse
import shutil
import sys
from dataclasses import fields
from pathlib import Path

from tangram_sglang.cli.folders import check_folder
from tangram_sglang.cli.hugging_face import load_config, not_loaded
from tangram_sglang.errors import TangramError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub name of the model")
    parser.add_argument("--out", type=Path, required=True, help="the gate file (.safetensors)")
    parser.add_argument(
        "--texts", type=Path, help="folder of *.txt to train on; default: the calibration texts"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=40,
        help="pieces of texts of up to 1024 tokens, at most (%(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=20, help="passes over their tokens (%(default)s)"
    )
    parser.add_argument(
        "--dim", type=int, default=16, help="size of a gate's queries and keys (%(default)s)"
    )
    parser.add_argument(
        "--sinks", type=int, default=16, help="learned keys of each KV head (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    for name, low in (("epochs", 1), ("dim", 1), ("sinks", 1), ("seed", 0)):
        if getattr(arguments, name) < low:
            raise TangramError(
                f"--{name} {getattr(arguments, name)}: expected a whole number of at least {low}"
            )
    if arguments.out.suffix != ".safetensors":
        raise TangramError(f"--out {arguments.out}: expected a name that ends in .safetensors")
    if arguments.out.is_dir():
        raise TangramError(f"--out {arguments.out}: is a folder, expected the name of a file")
    check_folder("--out", arguments.out, arguments.out.parent)
    import torch

    from tangram_sglang.calib import gate_contexts, gate_fit, kvzip
    from tangram_sglang.calib.gate_work import Recipe, Work
    from tangram_sglang.calib.texts import corpus, corpus_hash, texts_in
    from tangram_sglang.plan.file import config_hash
    from tangram_sglang.plan.model_config import model_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, config = load_config(arguments.model)
    texts = texts_in(arguments.texts) if arguments.texts else corpus()
    contexts = gate_contexts.contexts(texts, tokenizer, arguments.samples)
    recipe = Recipe(
        model=Path(arguments.model).resolve().name,
        config_hash=config_hash(model_config(config)),
        corpus_hash=corpus_hash(texts),
        contexts=len(contexts),
        held_out=gate_contexts.HELD_OUT,
        longest=gate_contexts.LONGEST,
        chunk=kvzip.CHUNK,
        prompt=kvzip.PROMPT,
        dim=arguments.dim,
        sinks=arguments.sinks,
        epochs=arguments.epochs,
        batch=gate_fit.BATCH,
        rate=gate_fit.RATE,
        seed=arguments.seed,
        device=device,
    )
    folder = arguments.out.with_suffix(".work")
    work = Work(folder, recipe)
    layers = _measure(arguments.model, tokenizer, contexts, work, device)
    _fit(contexts, layers, config, recipe, work)
    _finish(arguments.out, layers, config, recipe, work)
    shutil.rmtree(folder)
    print(arguments.out)
    return 0


def _measure(model_name, tokenizer, contexts, work, device) -> list:
    """Full-attention layers, once hidden states and scores of every context are in ``work``."""
    from tqdm import tqdm

    from tangram_sglang.calib import kvzip

    model = _load_model(model_name, device)
    layers = kvzip.full_layers(model, model.config)
    prompt = tokenizer(kvzip.PROMPT, add_special_tokens=False).input_ids
    missing = [i for i in range(len(contexts)) if not work.has_context(i)]
    total = sum(len(x.ids) for x in contexts)
    done = total - sum(len(contexts[i].ids) for i in missing)
    with tqdm(total=total, initial=done, unit=" tokens", disable=None) as bar:
        for i in missing:
            bar.set_description(f"repeating {contexts[i].name}")
            work.write_context(i, kvzip.measure(model, layers, contexts[i].ids, prompt))
            bar.update(len(contexts[i].ids))
    return layers


def _fit(contexts, layers, config, recipe, work) -> None:
    import torch
    from tqdm import tqdm

    from tangram_sglang.calib import gate_fit
    from tangram_sglang.calib.gate_work import Fitted

    for i, layer in enumerate(tqdm(layers, desc="fitting", unit=" layers", disable=None)):
        if work.has_layer(i):
            continue
        measured = [
            [x.to(recipe.device) for x in work.read_context(c, i)] for c in range(len(contexts))
        ]
        train = [m for m, c in zip(measured, contexts, strict=True) if not c.held_out]
        held_out = [m for m, c in zip(measured, contexts, strict=True) if c.held_out]
        ratio = layer.q_heads // layer.kv_heads
        start = gate_fit.initial_gate(
            config.hidden_size, layer.kv_heads, ratio, recipe.dim, recipe.sinks, recipe.seed, i
        ).to(recipe.device)
        hidden, scores = (torch.cat([m[j] for m in train]) for j in (0, 1))
        gate = gate_fit.fit(start, hidden, scores, epochs=recipe.epochs, seed=recipe.seed)
        figures = (gate_fit.agreement(x, held_out) for x in (start, gate))
        work.write_layer(i, Fitted(gate, *figures))


def _finish(out, layers, config, recipe, work) -> None:
    """Write the gate file and print how each layer's gate ranks held-out tokens."""
    import msgspec
    import torch

    from tangram_sglang.plan.gates import save_gates
    from tangram_sglang.score.gate import Gates

    fitted = [work.read_layer(i) for i in range(len(layers))]
    print("Spearman of gate and KVzip on held-out texts, mean over heads:")
    print(f"{'layer':>6}{'untrained':>11}{'trained':>9}")
    for layer, found in zip(layers, fitted, strict=True):
        print(f"{layer.layer_id:6}{found.untrained:11.3f}{found.trained:9.3f}")
    untrained, trained = (
        sum(getattr(x, name) for x in fitted) / len(fitted) for name in ("untrained", "trained")
    )
    print(f"{'mean':>6}{untrained:11.3f}{trained:9.3f}")
    stacked = (torch.stack([getattr(x.gate, f.name) for x in fitted]) for f in fields(Gates))
    made = {**msgspec.to_builtins(recipe), "spearman": [round(x.trained, 4) for x in fitted]}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_gates(
        out,
        Gates(*stacked),
        layers=[x.layer_id for x in layers],
        model=recipe.model,
        hf_config=config,
        recipe=made,
        corpus_hash=recipe.corpus_hash,
    )
    print(f"{out.stat().st_size} bytes", file=sys.stderr)


def _load_model(model: str, device: str):
    """The decoder without its output head; its attention hands out weights."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        found = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="eager"
        ).base_model
    except (OSError, ValueError) as error:
        raise not_loaded(model, error) from None
    return found.to(device).eval()
