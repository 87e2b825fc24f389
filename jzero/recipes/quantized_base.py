"""The frozen weights of QLoRA: read and quantised on the host, and merged with the adapters again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jzero import weights
from jzero.adapters.from_flax import from_flax
from jzero.display.slow_work import slow_work
from jzero.mesh import make_mesh
from jzero.model import Model
from jzero.models.decoder import Decoder
from jzero.models.decoder_config import DecoderConfig
from jzero.models.lora import LoRAConfig
from jzero.models.quantized import Kind, quantize_params
from jzero.step.train_step import TrainStep, make_train_step
from jzero.tree import PyTree


def quantized_params(directory: Path, model: Model, shape: DecoderConfig, kind: Kind) -> PyTree:
    """Read the weights on the host, in bfloat16 where the devices compute in it, and quantise them layer by layer.

    Returns:
      The parameters of the quantised `model` of `shape`, with None for its adapters.
    """
    with slow_work("quantising the weights"):
        like = jax.eval_shape(model.init, jax.random.key(0))
        return quantize_params(weights.load(directory, _on_host(shape)), like, kind)


def write_merged(params: PyTree, shape: DecoderConfig, directory: Path, out: Path) -> None:
    """Write the adapters among `params` for peft, and the weights of `directory` with the adapters merged."""
    step, host = _on_host(shape), jax.devices("cpu")[0]

    def filled(base: PyTree, trained: PyTree) -> PyTree:
        if isinstance(base, dict):
            return {name: filled(part, trained.get(name, {})) for name, part in base.items()}
        return jax.device_put(np.asarray(trained), host) if base is None else base  # the adapters alone are None

    whole = filled(weights.load(directory, step), params)
    weights.save(whole, step, out / "model", "model.safetensors", np.dtype(jnp.bfloat16))
    weights.save_adapters(whole, step, out / "adapters")


def _on_host(quantized: DecoderConfig) -> TrainStep:
    """Make a step on one CPU device of the model without quantisation, whose frozen weights are not in fp32."""
    shape = dataclasses.replace(quantized, lora=dataclasses.replace(quantized.lora or LoRAConfig(), quantized=None))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "bf16": {"enabled": jax.default_backend() != "cpu"},
        "trainable_parameters": ["lora_"],
    }
    mesh = make_mesh(devices=jax.devices("cpu")[:1])
    return make_train_step(from_flax(lambda rngs: Decoder(shape, rngs=rngs)), config, mesh=mesh)
