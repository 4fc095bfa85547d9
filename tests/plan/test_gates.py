"""The gate file: what is saved comes back, and each field that is wrong or differs is named."""

import dataclasses
import json

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tangram_sglang.calib.texts import corpus, corpus_hash
from tangram_sglang.cli.demo import PLANS
from tangram_sglang.errors import TangramError
from tangram_sglang.plan.file import load_plan, save_plan
from tangram_sglang.plan.gates import check_layers, load_gates, save_gates
from tangram_sglang.plan.serving import serving_plan
from tangram_sglang.plan.shape import LayerShape, ModelShape
from tangram_sglang.settings import Settings
from tests.plans import write_plan
from tests.reference.layout import model_shape
from tests.reference.tiny import random_gates, save, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    llama = tiny_llama(seed=1)
    save(llama, tmp_path_factory.mktemp("gates"))
    return llama


@pytest.fixture
def path(model, tmp_path):
    return write(model, tmp_path / "tiny-gates.safetensors", random_gates(model, seed=3))


def write(model, path, gates, layers=(0, 1)):
    save_gates(
        path,
        gates,
        layers=list(layers),
        model="tiny",
        hf_config=model.config,
        recipe={"epochs": 3},
        corpus_hash="f" * 64,
    )
    return path


def change(path, about=None, tensors=None):
    """The file again with other fields, by dotted name; None removes one."""
    with safe_open(path, framework="pt") as found:
        fields = json.loads(found.metadata()["tangram"])
    for name, value in (about or {}).items():
        *outer, last = name.split(".")
        place = fields
        for key in outer:
            place = place[key]
        place[last] = value
        if value is None:
            del place[last]
    values = load_file(path) | (tensors or {})
    values = {k: v.contiguous() for k, v in values.items() if v is not None}
    save_file(values, path, {"tangram": json.dumps(fields)})


def test_what_is_saved_comes_back(model, path):
    found = load_gates(path, model.config)
    check_layers(found, model_shape(model))
    for field in dataclasses.fields(found.gates):
        mine = getattr(random_gates(model, seed=3), field.name)
        assert torch.equal(getattr(found.gates, field.name), mine), field.name
    about = found.about
    assert (about.architecture.dim, about.architecture.sinks) == (5, 3)
    assert (about.model.id, about.recipe) == ("tiny", {"epochs": 3})
    assert (about.layers, about.corpus_hash) == ([0, 1], "f" * 64)


def test_the_same_gates_give_the_same_bytes(model, path, tmp_path):
    again = write(model, tmp_path / "again.safetensors", random_gates(model, seed=3))
    assert again.read_bytes() == path.read_bytes()


NORM = torch.ones(2, 5)
WRONG = [
    ({"format": "tangram-gates/9"}, {}, "format is 'tangram-gates/9', this version reads"),
    ({"tool_version": None}, {}, "missing required field `tool_version`"),
    ({"corpus_hash": None}, {}, "missing required field `corpus_hash`"),
    ({"model.id": 3}, {}, r"Expected `str`, got `int` - at `\$.model.id`"),
    ({"model.config_hash": "0"}, {}, "model.config_hash is 0"),
    ({"layers": "all"}, {}, r"Expected `array`, got `str` - at `\$.layers`"),
    ({"layers": [0]}, {}, r"q is \(2, 2, 2, 5, 64\).*\(1, 2, 2, 5, 64\)"),
    ({"architecture.dim": 4}, {}, r"q is \(2, 2, 2, 5, 64\).*\(2, 2, 2, 4, 64\)"),
    ({"architecture.sinks": None}, {}, r"missing required field `sinks` - at `\$.architecture`"),
    ({"recipe": 3}, {}, r"Expected `object`, got `int` - at `\$.recipe`"),
    ({"more": 3}, {}, "contains unknown field `more`"),
    ({}, {"bias": None}, "tensors is .*expected .*'bias'"),
    ({}, {"more": NORM}, "tensors is .*'more'"),
    ({}, {"q_norm": NORM[:, :4]}, r"q_norm is \(2, 4\)"),
    ({}, {"q_norm": NORM.int()}, r"q_norm is \(2, 5\) torch.int32"),
    ({}, {"k_norm": NORM * torch.nan}, "k_norm is not finite"),
]


@pytest.mark.parametrize(("about", "tensors", "message"), WRONG, ids=lambda x: str(x)[:30])
def test_a_field_that_is_wrong_is_named(model, path, about, tensors, message):
    change(path, about, tensors)
    with pytest.raises(TangramError, match=f"gate file .*{message}"):
        load_gates(path, model.config)


def test_a_file_that_is_none_is_refused(model, path, tmp_path):
    with pytest.raises(TangramError, match=r"cannot be read \(No such file"):
        load_gates(tmp_path / "nowhere.safetensors", model.config)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(TangramError, match="is no safetensors file"):
        load_gates(path, model.config)
    save_file({"q": NORM}, path)
    with pytest.raises(TangramError, match="format is None"):
        load_gates(path, model.config)


def test_gates_of_another_model_are_refused_naming_what_differs(model, path):
    other = tiny_llama(seed=1, kv_heads=4)
    other.config.architectures = model.config.architectures
    with pytest.raises(
        TangramError, match="num_key_value_heads is 2 in the gate file and 4 in the model"
    ):
        load_gates(path, other.config)
    found = load_gates(path, model.config)
    shape = model_shape(model)
    one, two = shape.layers
    with pytest.raises(TangramError, match=r"layers is \[0, 1\].* layers are \[1\]"):
        check_layers(found, ModelShape((two,)))
    wide = dataclasses.replace(two, q_heads=8)
    with pytest.raises(TangramError, match=r"2 KV heads with 2 query.*\[\(2, 2\), \(2, 4\)\]"):
        check_layers(found, ModelShape((one, wide)))


def test_a_plan_names_its_gates_and_a_setting_goes_before(model, path, tmp_path):
    shape = model_shape(model)
    plan_path, _ = write_plan(model, tmp_path, scorer="fastkvzip")
    settings = Settings(plan=str(plan_path), recent=16, page=4)

    def serve(settings):
        return serving_plan(settings, model.config, shape, 1024, "cpu")

    with pytest.raises(TangramError, match="names none; give TANGRAM_GATES"):
        serve(settings)
    assert serve(dataclasses.replace(settings, retention=1.0)).gates is None
    plan = load_plan(plan_path)
    sha256 = load_gates(path, model.config).sha256

    def name_gates(sha256):
        selection = replace(plan.selection, gates_file=path.name, gates_hash=sha256)
        save_plan(replace(plan, selection=selection), plan_path)

    name_gates(sha256)
    found = serve(settings)
    assert found.gates.sha256 == sha256
    assert found.layout.score_groups == 1
    name_gates("0" * 64)
    with pytest.raises(TangramError, match=f"sha256 is {sha256}, the plan names {'0' * 64}"):
        serve(settings)
    other = write(model, tmp_path / "other.safetensors", random_gates(model, seed=4))
    chosen = serve(dataclasses.replace(settings, gates=str(other)))
    assert chosen.gates.path == other
    assert chosen.digest != found.digest


def test_the_shipped_gates_are_smollm2s_and_small(smollm2):
    path = PLANS / "smollm2-135m-instruct-gates.safetensors"
    found = load_gates(path, AutoConfig.from_pretrained(smollm2))
    check_layers(found, ModelShape(tuple(LayerShape(i, 9, 3, 64, None, 0.125) for i in range(30))))
    assert path.stat().st_size < 3_000_000
    # they were trained on the first texts, before there were more
    assert found.about.corpus_hash == corpus_hash(corpus()[:15])
    spearman = found.about.recipe["spearman"]
    assert len(spearman) == 30 and min(spearman) > 0.5
