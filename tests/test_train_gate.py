"""`tangram train-gate`: KVzip's scores against a slow model, and the command from texts to gate file."""

import os
import signal

import pytest
import torch
from transformers import AutoModel

from tangram_sglang.calib import gate_contexts, gate_fit, gate_work, kvzip
from tangram_sglang.calib.report_tables import spearman
from tangram_sglang.calib.texts import corpus
from tangram_sglang.cli import main
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.gates import check_layers, load_gates
from tests.reference.layout import model_shape
from tests.reference.model import final_hidden, sliding_window
from tests.reference.tiny import random_tokens, save, tiny_gemma3, tiny_llama, tiny_tokenizer

PROMPT = [20, 21, 22]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def reconstruct(model, context, chunk):
    """Hidden states [n, hidden] and scores [n, H] of each layer: one pass a chunk, all of it anew."""
    n, config = len(context), model.config
    layers = range(config.num_hidden_layers)
    hidden = [None for _ in layers]
    scores = [torch.zeros(n, config.num_key_value_heads) for _ in layers]

    def attend(layer, q, k, v):
        total, ratio = q.shape[1], len(q) // len(k)
        query, key = torch.arange(total)[:, None], torch.arange(total)[None]
        seen = key <= query
        if window := sliding_window(config, layer):
            seen &= key > query - window
        out = []
        for i in range(len(q)):
            scaling = model.model.layers[layer].self_attn.scaling
            weights = (q[i] @ k[i // ratio].T * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
            most = weights[n:, :n].amax(dim=0)
            scores[layer][:, i // ratio] = torch.maximum(scores[layer][:, i // ratio], most)
            out.append(weights @ v[i // ratio])
        return torch.stack(out)

    def note(layer):
        def hook(module, args):
            hidden[layer] = args[0][:n]

        return model.model.layers[layer].self_attn.k_proj.register_forward_pre_hook(hook)

    hooks = [note(layer) for layer in layers]
    for start in range(0, n, chunk):
        lead = context[max(0, start - 8) : start + chunk]
        final_hidden(model, [*context, *PROMPT, *lead], 0, attend)
    for hook in hooks:
        hook.remove()
    return hidden, scores


@torch.no_grad()
@pytest.mark.parametrize(("make", "full"), [(tiny_llama, [0, 1]), (tiny_gemma3, [1, 3])])
def test_scores_are_the_most_that_a_repetition_attends_to_each_key(make, full, tmp_path):
    model = make(seed=3)
    folder = save(model, tmp_path / "model")
    context = random_tokens(45, seed=1)
    expected = reconstruct(model, context, 20)
    decoder = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    layers = kvzip.full_layers(decoder, decoder.config)
    assert [x.layer_id for x in layers] == full
    found = kvzip.measure(decoder, layers, context, PROMPT, chunk=20)
    for place, layer in enumerate(full):
        torch.testing.assert_close(found.hidden[place], expected[0][layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.scores[place], expected[1][layer], rtol=1e-4, atol=1e-5)


def test_agreement_is_spearmans():
    generator = torch.Generator().manual_seed(0)
    gate = gate_fit.initial_gate(24, 3, 2, 4, 5, seed=1, layer=0)
    contexts = []
    for n in (30, 77):
        hidden = torch.randn(n, 24, generator=generator)
        contexts.append((hidden, gate.scores(hidden) + 0.1 * torch.rand(n, 3, generator=generator)))
    expected = [
        sum(spearman(gate.scores(h)[:, i].detach().numpy(), s[:, i].numpy()) for i in range(3)) / 3
        for h, s in contexts
    ]
    assert 0.5 < sum(expected) / 2 < 1
    assert gate_fit.agreement(gate, contexts) == pytest.approx(sum(expected) / 2, abs=1e-6)


def test_pieces_are_mixed_and_whole_texts_are_held_out():
    tokenizer = tiny_tokenizer()
    found = gate_contexts.contexts(corpus()[:15], tokenizer, 22)
    assert len(found) == 22
    # the first piece of each text comes first; one has no piece long enough in words
    assert len({x.name for x in found[:14]}) == 14
    held_out = {x.name for x in found if x.held_out}
    assert held_out == {"markdown_table", "support_chat", "code_server"}
    assert not any(x.held_out for x in found if x.name not in held_out)
    assert all(128 <= len(x.ids) <= 1024 for x in found)
    with pytest.raises(TangramError, match="--samples 3: expected at least 4"):
        gate_contexts.contexts(corpus(), tokenizer, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    llama = tiny_llama(seed=1)
    return llama, save(llama, tmp_path_factory.mktemp("models") / "Tiny-Llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(5):
        # few different words, whose keys differ in what they get
        words = [f"w{8 + t % 20}" for t in random_tokens(300, seed=i)]
        (folder / f"text{i}.txt").write_text(" ".join(words))
    return folder


def command(model, texts, out, *more):
    few = ("--epochs", "30", "--dim", "6", "--sinks", "4")
    return [
        *("train-gate", "--model", str(model[1]), "--texts", str(texts), "--out", str(out)),
        *(few + more),
    ]


def killed(argv, monkeypatch, method, calls):
    """Run the command in a process that is killed when it calls ``Work.method`` once more."""
    pid = os.fork()
    if pid == 0:
        original, seen = getattr(gate_work.Work, method), []

        def counting(*args):
            seen.append(args)
            if len(seen) > calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        monkeypatch.setattr(gate_work.Work, method, counting)
        main(argv)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_gates_come_out_the_same_if_the_command_is_killed_and_asked_again(
    model, texts, tmp_path, capsys, monkeypatch
):
    whole, out = tmp_path / "whole.safetensors", tmp_path / "tiny-gates.safetensors"
    assert main(command(model, texts, whole)) == 0
    printed = capsys.readouterr().out
    rows = {x.split()[0]: x.split()[1:] for x in printed.splitlines()[2:5]}
    assert set(rows) == {"0", "1", "mean"}
    untrained, trained = map(float, rows["mean"])
    assert trained > 0.5 > abs(untrained) + 0.2

    argv = command(model, texts, out)
    killed(argv, monkeypatch, "write_context", 2)
    work = tmp_path / "tiny-gates.work"
    assert sorted(x.name for x in work.glob("context-*")) == [
        "context-000.safetensors",
        "context-001.safetensors",
    ]
    # another recipe must not go on from there
    assert main(command(model, texts, out, "--seed", "7")) == 2
    assert "seed is 0 there and 7 now" in capsys.readouterr().err
    killed(argv, monkeypatch, "write_layer", 1)
    assert not out.exists()
    measured = []
    monkeypatch.setattr(kvzip, "measure", lambda *args: measured.append(args))
    assert main(argv) == 0
    assert measured == []
    assert not work.exists()
    assert out.read_bytes() == whole.read_bytes()
    assert printed.splitlines()[:-1] == capsys.readouterr().out.splitlines()[:-1]
    found = load_gates(out, model[0].config)
    check_layers(found, model_shape(model[0]))
    about = found.about
    assert (about.architecture.dim, about.architecture.sinks) == (6, 4)
    assert about.recipe["contexts"] == 5
    assert [round(x, 3) for x in about.recipe["spearman"]] == [
        float(rows[layer][1]) for layer in ("0", "1")
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--epochs", "0"), "--epochs 0: expected a whole number of at least 1"),
        (("--samples", "2"), "--samples 2: expected at least 4"),
        (("--texts", "/nowhere"), "--texts /nowhere: no such folder"),
        (("--model", "/nowhere"), "--model /nowhere cannot be loaded"),
        (("--out", "gates.pt"), "--out gates.pt: expected a name that ends in .safetensors"),
        (("--out", f"{__file__}/gates.safetensors"), f"{__file__} is a file, expected a folder"),
    ],
)
def test_a_mistake_is_one_line(model, texts, tmp_path, capsys, more, message):
    assert main(command(model, texts, tmp_path / "gates.safetensors", *more)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
