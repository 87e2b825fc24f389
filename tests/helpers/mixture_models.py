"""A decoder whose layers are mixtures of experts, its batches, and train steps of it."""

from functools import lru_cache

import jax
import numpy as np

import jzero
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.moe import MixtureConfig

BATCH, SEQUENCE, VOCAB, STEPS, LR = 16, 8, 64, 3, 0.1
CONFIG = DecoderConfig(2, 32, 4, 2, 64, vocab_size=VOCAB, attention="xla", mixture=MixtureConfig(4, 2, 16))


@lru_cache
def model(config):
    return jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs))


@lru_cache
def initial(config):
    return jax.device_get(jax.jit(model(config).init)(jax.random.key(0)))


@lru_cache
def batches():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    return [{"inputs": x[:, :-1], "labels": x[:, 1:]} for x in tokens]


def make_step(config, *, stage=0, accum=1, remat="none", unroll=True, schedule="1f1b", more=None, **mesh):
    degrees = {"data": 1, "zero": 1, **mesh}
    devices = jax.devices()[: int(np.prod(list(degrees.values())))]
    settings = {
        "train_batch_size": BATCH, "gradient_accumulation_steps": accum, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"policy": remat}, "stack": {"unroll": unroll},
        **({"pipeline": {"schedule": schedule}} if "pipe" in mesh else {}), **(more or {}),
    }  # fmt: skip
    return jzero.make_train_step(model(config), settings, mesh=jzero.make_mesh(**degrees, devices=devices))
