"""Every optimizer at every stage on eight devices: its state lies as the table says, its result is stage 0's.

What could differ: an optimizer that looks at a whole parameter (Lamb, Muon, Adafactor, ...) must not take a shard, or
the whole layer stack, for one.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.optimizers import CASES, IDS
from helpers.oracle import mean_of, stacked_loss, train
from helpers.sampling import keep

import jzero
from jzero.tree import named
from models.llama import Llama, LlamaConfig

DEVICES, LAYERS, STEPS = 8, 2, 3


class Stack:
    """A stacked regression in plain JAX: few leaves, so that compiling an optimizer is cheap."""

    def init(self, rng):
        keys = jax.random.split(rng, 4)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        return {
            "ends": {"embed": normal(keys[0], 32, 16)},
            "stack": {"w": normal(keys[1], LAYERS, 16, 24), "b": normal(keys[2], LAYERS, 24)},
        }

    def prefix(self, ends, batch, rng):
        return ends["embed"][batch["inputs"]]

    def block(self, layer, x, rng):
        return x + jnp.tanh(x @ layer["w"] + layer["b"])[..., :16]

    def suffix(self, ends, x, batch, rng):
        return ((x @ ends["embed"].T - batch["labels"]) ** 2).mean()

    loss = stacked_loss


@lru_cache
def batches():
    rng = np.random.default_rng(0)
    return [
        {"inputs": rng.integers(0, 32, 16).astype(np.int32), "labels": rng.normal(size=(16, 32)).astype(np.float32)}
        for _ in range(STEPS)
    ]


def make(name, params, stage, model, rows):
    config = {
        "train_batch_size": rows,
        "optimizer": {"type": name, "params": params},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "stack": {"unroll": False},
    }
    if "weight_decay" in params:
        config["optimizer"]["groups"] = [{"match": "/w$", "lr_scale": 0.5}, {"match": "embed", "weight_decay": 0.0}]
    return jzero.make_train_step(model, config, mesh=jzero.make_mesh(zero=DEVICES))


def per_device(tree):
    """Elements on the first device."""
    return sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(tree))


def total(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def assert_same_training(stage, ours, theirs, start):
    """1e-6 of what each leaf has moved, over the whole leaf, and the rounding of the parameters themselves.

    Not element by element: where a gradient cancels to nearly nothing it is rounding noise, and Adam, Lion and their
    kin make a full step of it in a direction that depends on the order of a sum.
    """

    def check(path, a, b, s):
        moved, apart = np.linalg.norm(np.float64(b) - s), np.linalg.norm(np.float64(a) - b)
        assert moved > 1e-6 * np.linalg.norm(s), (stage, path, "did not train")
        assert apart <= 1e-6 * moved + 6e-8 * STEPS * np.linalg.norm(b), (stage, path, apart / moved)

    jax.tree_util.tree_map_with_path(check, ours, theirs, start)


def owned(tree, params):
    """The leaves of an optimizer state that belong to a parameter and have its shape, with the parameter."""
    keys = lambda path: tuple(map(str, path))  # noqa: E731
    known = {keys(path): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for start in range(len(path)):
            param = known.get(keys(path)[start:])
            if param is not None and param.shape == x.shape:
                yield x, param


def check_stages(name, params, model, data):
    first = make(name, params, 0, model, len(data[0]["inputs"]))
    start = jax.device_get(first.init(jax.random.key(0)).params)
    end = jax.device_get(train(first, start, data)[1].params)
    for stage in (1, 2, 3):
        step = make(name, params, stage, model, len(data[0]["inputs"]))
        state = step.init(jax.random.key(0), start)
        before = jax.tree.map(lambda x: x.sharding, state)
        assert per_device(state.params) == total(state.params) // DEVICES
        mine = list(owned(state.opt_state, state.params))
        assert all(x.sharding == param.sharding for x, param in mine)
        replicated = total(state.opt_state) - sum(x.size for x, _ in mine)
        assert per_device(state.opt_state) == (total(state.opt_state) - replicated) // DEVICES + replicated
        if name not in ("adafactor", "novograd", "sm3"):  # factored moments, one moment a layer: small
            assert replicated < 100  # counters
        _, after = train(step, start, data)
        assert jax.tree.map(lambda x: x.sharding, after) == before
        assert_same_training(stage, jax.device_get(after.params), end, start)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), keep(CASES, [case for case in CASES if case[0] == "Muon"]), ids=IDS)
def test_sharding_stays_and_the_result_is_stage_0s(name, params):
    """With parameter groups where there is a decay."""
    check_stages(name, params, Stack(), batches())


@pytest.mark.slow
def test_muon_orthogonalises_a_llamas_fused_matrices_each_for_itself():
    model = jzero.from_flax(lambda rngs: Llama(LlamaConfig(LAYERS, 16, 2, 1, 24, vocab_size=32), rngs=rngs))
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    step, batch = make("Muon", {"lr": 0.125}, 3, model, 8), {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    start = jax.device_get(step.init(jax.random.key(0)).params)
    gradients = jax.device_get(jax.grad(mean_of(model))(start, batch))
    clip = min(1.0, 1 / np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradients))))
    first_blend = (1 - 0.95**2) * clip  # the first momentum is 0.05 g, and the blend 0.05 g + 0.95 * 0.05 g
    end = jax.device_get(train(step, start, [batch])[1].params)
    matrices = {
        "stack/attention/qkv/kernel": lambda w: (w[:, 0, :2].reshape(16, 16), w[:, 0, 2], w[:, 0, 3]),  # 2 queries
        "stack/mlp/gate_up/kernel": lambda w: (w[:, 0], w[:, 1]),
        "stack/mlp/down/kernel": lambda w: (w,),
    }
    for name, apart in matrices.items():
        before, after, gradient = (named(tree)[name].astype(np.float64) for tree in (start, end, gradients))
        for i in range(LAYERS):
            blends, moved = apart(first_blend * gradient[i]), apart((before[i] - after[i]) / 0.125)
            for ours, blend in zip(moved, blends, strict=True):
                theirs = newton_schulz(blend) * max(1, blend.shape[1] / blend.shape[0]) ** 0.5
                assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs), name


def newton_schulz(g):
    """DeepSpeed 0.19.8, deepspeed/runtime/zero/muon/original_muon.py, `zeropower_via_newtonschulz5` (line 51)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x
