"""Layouts of groups of devices that act as one, engines of them, and the same steps by optax on one device."""

import dataclasses
from functools import cache

import jax
import numpy as np
import optax
from helpers.mixture_models import BATCH, CONFIG, batches, initial, model
from helpers.oracle import plain_loop

import jzero

QUIET = dataclasses.replace(CONFIG, num_layers=4, mixture=dataclasses.replace(CONFIG.mixture, balance=0.0))
CHUNKED = {"schedule": "interleaved", "chunks": 2}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = {
    "pipe x tensor": ({"pipe": 2, "tensor": 2}, 0, {"schedule": "zero_bubble"}, {}),
    "pipe x expert x context": ({"pipe": 2, "expert": 2, "context": 2}, 2, CHUNKED, {}),
    "expert x context x tensor": ({"expert": 2, "context": 2, "tensor": 2}, 3, {}, {}),
    "data x zero x tensor, offloaded": ({"data": 2, "zero": 2, "tensor": 2}, 3, {}, OFFLOADED),
    "zero x context, scanned": ({"zero": 2, "context": 2}, 3, {}, {}),
    "zero": ({"zero": 4}, 2, {}, {}),
    "expert": ({"expert": 4}, 3, {}, {}),
    "one": ({}, 0, {}, {}),
}


def make_engine(name):
    degrees, stage, pipeline, offload = LAYOUTS[name]
    degrees = {"zero": 1, **degrees}
    settings = {
        "train_batch_size": BATCH, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **offload}, "mesh": degrees,
        "pipeline": pipeline, "stack": {"unroll": not ("scanned" in name or offload)}, "steps_per_print": None,
    }  # fmt: skip
    mesh = jzero.make_mesh(settings, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    return jzero.initialize(model=model(QUIET), config=settings, mesh=mesh, params=initial(QUIET))[0]


@cache
def plain():
    """(the loss of each step, parameters after the last) of optax."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))

    def mean(params, batch):
        logits = model(QUIET).module(params)(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    run = plain_loop(mean, initial(QUIET), batches(), tx)
    return run.losses, run.params
