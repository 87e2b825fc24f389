"""Engines of the models that wrote DeepSpeed's stored checkpoints, and what is known of those runs."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import make_checkpoints
import numpy as np
from flax import nnx
from helpers.drawn import zeros
from make_checkpoints import LLAMA

import jzero
from models import from_hf

SIZES = (5, 7), (7, 7), (7, 3)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.fc1, self.fc2, self.fc3 = (nnx.Linear(*sizes, rngs=rngs) for sizes in SIZES)

    def __call__(self, x):
        x = x.astype(self.fc1.kernel.dtype)
        return self.fc3(nnx.relu(self.fc2(nnx.relu(self.fc1(x)))))


def squares(outputs, targets):
    return ((outputs.astype("float32") - targets) ** 2).mean()


def make_model(kind="mlp", pipe=1):
    """Return the model of a case; by default that of `jzero import --model stored_runs:make_model`."""
    if kind == "llama":
        return from_hf({"model_type": "llama", **LLAMA})
    if kind == "pipe":
        first, second, third = (jzero.LayerSpec(nnx.Linear, *sizes) for sizes in SIZES)
        return jzero.PipelineModule([first, jnp.tanh, second, jnp.tanh, third], num_stages=pipe, loss_fn=squares)
    return jzero.from_flax(MLP, lambda model, batch: squares(model(batch[0]), batch[1]))


def about(directory):
    return json.loads((directory / "losses.json").read_text())


def config_of(directory, stage):
    """DeepSpeed's config at another stage, without what jzero does not know."""
    config = about(directory)["config"]
    config["zero_optimization"] = {"stage": stage}
    config["optimizer"]["params"].pop("torch_adam", None)
    if directory.name.endswith("groups"):
        config["optimizer"]["no_weight_decay"] = "norms_biases"
    if directory.name.endswith("frozen"):
        config["frozen_parameters"] = ["^fc2"]
    return {key: x for key, x in config.items() if key not in ("zero_allow_untested_optimizer", "steps_per_print")}


@cache
def make_step(kind, config, devices, pipe):
    """The train step of a config, as text; cases that differ in DeepSpeed's stage alone share what is compiled."""
    mesh = jzero.make_mesh(pipe=pipe, devices=jax.devices()[:devices])
    return jzero.make_train_step(make_model(kind, pipe), json.loads(config), mesh=mesh)


def make_engine(directory, kind, stage=1, devices=1, pipe=1):
    """An engine of DeepSpeed's config, with zeros for weights."""
    config = config_of(directory, stage) | {"stack": {"unroll": "auto" if pipe > 1 else False}}
    step = make_step(kind, json.dumps(config, sort_keys=True), devices, pipe)
    return jzero.Engine(step, jax.random.key(0), params=zeros(step.state_shapes.params))


def batch(kind, step):
    parts = make_checkpoints.batch(kind, step)
    if kind == "llama":
        tokens = parts[0].astype(np.int32)
        return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    return parts
