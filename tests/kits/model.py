"""A tiny random model with a real tokenizer: the kits send text, and token ids up to 31,999."""

import json
import shutil
from pathlib import Path

from tests.reference.tiny import tiny_llama

# the highest token id that a kit sends by itself is 31,999; more would slow down every log-prob
VOCAB = 32_000
CONTEXT = 16_384


def save_tiny_model(folder: Path, tokenizer_folder: Path) -> Path:
    """Two layers, and the first 32,000 tokens of the byte-level tokenizer in `tokenizer_folder`."""
    # the ids that SmolLM2's tokenizer gives to its marks
    model = tiny_llama(seed=5, max_positions=CONTEXT, vocab=VOCAB, pad=2, bos=1, eos=2)
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_folder / name, folder / name)
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    core = tokenizer["model"]
    core["vocab"] = {token: i for token, i in core["vocab"].items() if i < VOCAB}
    core["merges"] = [pair for pair in core["merges"] if "".join(pair) in core["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
