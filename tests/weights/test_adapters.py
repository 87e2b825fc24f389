"""Adapters in files: peft reads and writes what jzero writes and reads; merged weights compute the same logits."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.plain_flax import mean_square
from helpers.refusals import says
from helpers.sampling import some
from llamas import GROUPED, TOKENS, engine, logits, model, same, step
from safetensors.numpy import load_file

import jzero
from jzero import weights
from jzero.cli import main
from jzero.run.run_report import report
from models.lora import LoRAConfig

ALL = replace(GROUPED, lora=LoRAConfig(r=2, lora_alpha=3, target_modules="all-linear"))
SOME = replace(GROUPED, lora=LoRAConfig(r=4, lora_alpha=6, target_modules=["v_proj", "gate_proj"]))
TRAINED = {"trainable_parameters": ["lora_"]}
BATCH = {"inputs": TOKENS, "labels": TOKENS}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    made, path = engine(model(GROUPED), seed=3), tmp_path_factory.mktemp("base")
    weights.save(made.state.params, made.step_fn, path, "model.safetensors", np.dtype("float32"))
    return path, made


def tuned(base, shape=ALL, more=TRAINED, **layout):
    made = step(model(shape), more=more, **layout)
    adapters, loaded = drawn(made.state_shapes.params, scale=0.2), weights.load(base[0], made)
    params = jax.tree.map(lambda x, known: x if known is None else known, adapters, loaded)
    return jzero.Engine(made, jax.random.key(0), params=params)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base):
    path, made = tmp_path_factory.mktemp("adapter"), tuned(base, SOME)
    made.save_adapters(path)
    return path, made


@pytest.mark.slow
def test_peft_reads_what_jzero_writes(tmp_path, base):
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    made = tuned(base)
    made.save_adapters(tmp_path / "adapter")
    made.save_16bit_model(tmp_path / "bf16")
    weights.save(made.state.params, made.step_fn, tmp_path / "merged", "model.safetensors", np.dtype("float32"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base[0], dtype=torch.float32)
    there = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with torch.no_grad():
        found = there(torch.tensor(TOKENS)).logits
        with there.disable_adapter():
            assert abs(there(torch.tensor(TOKENS)).logits - found).max() > 0.1
    np.testing.assert_allclose(found, logits(model(ALL), made.state.params), atol=1e-5, rtol=0)
    unmerged = there.merge_and_unload().state_dict()
    merged, half = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "bf16"))
    assert merged.keys() == unmerged.keys()
    for name, x in merged.items():
        np.testing.assert_allclose(x, unmerged[name], atol=1e-6, rtol=1e-5, err_msg=name)
        assert same(half[name], x.astype(half[name].dtype)), name  # rounded once, after the sum


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ALL, SOME], ids=["all", "some"])
def test_jzero_reads_what_peft_writes(tmp_path, base, shape):
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    keys = {"r": shape.lora.r, "lora_alpha": shape.lora.lora_alpha, "target_modules": [*shape.lora.target_modules]}
    plain = transformers.AutoModelForCausalLM.from_pretrained(base[0], dtype=torch.float32)
    torch.manual_seed(0)
    there = peft.get_peft_model(plain, peft.LoraConfig(**keys, task_type="CAUSAL_LM", init_lora_weights=False))
    there.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = there(torch.tensor(TOKENS)).logits.numpy()
    made = step(model(shape), 3, zero=2, more=TRAINED)
    params = weights.load(tmp_path, made, params=weights.load(base[0], made))
    assert jax.tree.map(lambda x: x.sharding, params) == made.state_shardings.params
    np.testing.assert_allclose(logits(model(shape), params), expected, atol=1e-5, rtol=0)
    weights.save_adapters(params, made, tmp_path / "back")
    folders = tmp_path, tmp_path / "back"
    assert same(*(load_file(path / "adapter_model.safetensors") for path in folders))
    theirs, ours = (json.loads((path / "adapter_config.json").read_text()) for path in folders)
    for config in (theirs, ours):
        config["target_modules"].sort()
    ours.pop("base_model_name_or_path")
    assert {key: theirs[key] for key in ours} == ours


LAYOUTS = [{"stage": 3, "zero": 4}, {"stage": 1, "zero": 2, "pipe": 2}]


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[:1]), ids=str)
def test_checkpoints(tmp_path, base, layout):
    """A checkpoint without frozen weights has the adapters; a whole one also what is merged, in its chunks."""
    made = tuned(base, SOME, **layout)
    made.save_checkpoint(tmp_path / "small", exclude_frozen_parameters=True).wait()
    made.save_checkpoint(tmp_path / "whole").wait()
    made.save_adapters(tmp_path / "adapter")
    for source in ("small", "whole"):
        assert main(["export", str(tmp_path / source), str(tmp_path / f"{source}-a"), "--adapters"]) == 0
        folders = tmp_path / f"{source}-a", tmp_path / "adapter"
        files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
        assert files[0].keys() == {"adapter_model.safetensors", "adapter_config.json"}
        assert files[0] == files[1]
    weights.export(tmp_path / "whole", tmp_path / "out")
    found, start = (load_file(path / "model.safetensors") for path in (tmp_path / "out", base[0]))
    assert found.keys() == start.keys()
    v_proj = jax.device_get(made.state.params)["stack"]["attention"]["qkv"]["v_proj"]
    for i in range(4):  # plain arithmetic, in float64
        a, b = (np.float64(v_proj[part][i]) for part in ("lora_a", "lora_b"))
        name = f"model.layers.{i}.self_attn.v_proj.weight"
        np.testing.assert_allclose(found[name], start[name] + (6 / 4 * a @ b).T, atol=1e-6, rtol=1e-6)
    assert {name for name, x in found.items() if not same(x, start[name])} == {
        f"model.layers.{i}.{module}.weight" for i in range(4) for module in ("self_attn.v_proj", "mlp.gate_proj")
    }
    words = "was saved without", "ends.embed", "jzero export --adapters"
    says(lambda: weights.export(tmp_path / "small", tmp_path / "none"), *words)


@pytest.mark.slow
def test_merged_weights_do_not_count_adapters_twice(tmp_path, base):
    made, twin = tuned(base, SOME), jzero.Engine(step(model(SOME), more=TRAINED), jax.random.key(0))
    made.save_16bit_model(tmp_path)
    for path in (tmp_path, base[0]):  # nothing in the files says which of them is merged
        words = ["lacks the adapters", "lora_b", "not zero", "into a new engine"]
        says(lambda path=path: made.load_weights(path), *words)
    twin.load_weights(tmp_path)
    assert float(twin.eval_batch(BATCH)) == pytest.approx(float(made.eval_batch(BATCH)), rel=1e-3)  # bfloat16 files
    before = jax.device_get(made.state.params)
    made.load_weights(base[0], missing=["lora_"])
    assert same(made.state.params["stack"], before["stack"])


class Classifier(nnx.Module):
    def __init__(self, rngs, rank=None):
        self.fc1 = nnx.Linear(16, 32, rngs=rngs)
        self.fc2 = nnx.Linear(32, 8, rngs=rngs)
        if rank:
            self.fc1 = nnx.LoRA(16, rank, 32, base_module=self.fc1, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    plain = engine(jzero.from_flax(Classifier, mean_square), seed=5)
    weights.save(plain.state.params, plain.step_fn, path, "model.safetensors", np.dtype("float32"))
    wrapped = jzero.from_flax(lambda rngs: Classifier(rngs, rank=2), mean_square)
    return path, plain, jzero.Engine(step(wrapped, 3, zero=2, more=TRAINED), jax.random.key(0))


def test_renamed_prefixes(classifier):
    path, plain, wrapped = classifier
    expected, given = jax.device_get(wrapped.state.params), jax.device_get(plain.state.params)
    expected["fc1"]["base_module"], expected["fc2"] = given["fc1"], given["fc2"]
    wrapped.load_weights(path, rename={"base_module/": ""}, missing=["lora_"])
    assert same(wrapped.state.params, expected)
    params = weights.load(path, wrapped.step_fn, rename={"base_module/": ""}, missing=["lora_"])
    assert same(wrapped.step_fn.init(wrapped._rng, params).params, expected)


WRONG = [
    ({}, "missing fc1.base_module.kernel (16, 32)"),
    ({"rename": {"base_module/": ""}}, "missing fc1.lora_a (16, 2)"),
    ({"rename": {"base/": ""}}, "rename: 'base/' matches no parameter; the names are fc1/base_module/"),
    ({"rename": {"lora_.": "x"}}, "rename = {'lora_.': 'x'}: two parameters get the name fc1/x"),
    ({"missing": ["adapter"]}, "missing: 'adapter' matches no parameter"),
    ({"rename": [("base_module/", "")]}, "rename = [('base_module/', '')]: must be a dict"),
    ({"missing": ["("]}, "missing: '(' is not a regular expression"),
    ({"missing": "lora_"}, "missing = 'lora_': must be a list; write ['lora_']"),
    ({"rename": {"base_module/": r"\2"}}, r"rename: '\\2' is not a replacement for 'base_module/'"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_refused_names(classifier, options, words):
    path, _, wrapped = classifier
    says(lambda: weights.load(path, wrapped.step_fn, **options), words)


def test_refused_adapters(tmp_path, base, adapter):
    path, made = adapter
    says(lambda: weights.load(path, made.step_fn), "adapters alone", "pass them as params")
    says(lambda: base[1].load_weights(path), "the model has none", "lora=LoRAConfig")
    other = step(model(replace(SOME, lora=replace(SOME.lora, lora_alpha=8))))
    params = made.state.params
    says(lambda: weights.load(path, other, params=params), "lora_alpha = 6, not 8; give the decoder the lora=")
    other = step(model(replace(SOME, lora=replace(SOME.lora, target_modules=["q_proj"]))))
    missing = "missing base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight (4, 32)"
    says(lambda: weights.load(path, other, params=params), missing, "and 16 more")
    both = tmp_path / "both"
    made.save_16bit_model(both)
    made.save_adapters(both)
    says(lambda: made.load_weights(both), "adapter_model.safetensors next to other weights", "pass the file")
    others = jax.tree_util.tree_map_with_path(lambda path, x: -x if "lora_" in path[-1].key else x, params)
    assert same(weights.load(both / "adapter_model.safetensors", made.step_fn, params=others), params)
    says(lambda: base[1].save_adapters(tmp_path / "no"), "no adapters", "lora=LoRAConfig", "transformers has")
    base[1].save_checkpoint(tmp_path / "plain").wait()
    says(lambda: weights.export(tmp_path / "plain", tmp_path / "no", adapters=True), "no adapters")
    assert not (tmp_path / "no").exists()


def test_adapters_alone_are_refused_where_more_is_trained(tmp_path, base):
    """They would go onto weights that they were not trained with; merged weights have all of it."""
    made = tuned(base, SOME, {"trainable_parameters": ["lora_", "embed"]})
    assert "ends/embed is trained besides the adapters" in " ".join(report(made.step_fn).split())
    assert "besides the adapters" not in report(step(model(SOME), more=TRAINED)) + report(step())
    made.save_checkpoint(tmp_path / "run").wait()
    for save in (made.save_adapters, lambda out: weights.export(tmp_path / "run", out, adapters=True)):
        words = ["ends/embed is trained too", '"trainable_parameters": ["lora_"]']
        says(lambda save=save: save(tmp_path / "no"), *words)
    assert not (tmp_path / "no").exists()
    made.save_16bit_model(tmp_path / "merged")
    weights.export(tmp_path / "run", tmp_path / "exported")
    for name in ("merged", "exported"):
        found = load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"]
        np.testing.assert_allclose(np.float32(found), made.state.params["ends"]["embed"], rtol=2**-8)
