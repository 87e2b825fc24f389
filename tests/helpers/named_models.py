"""Models from `models/`, made from their configs."""

import jzero
from models.named import module_of


def model_of(config):
    return jzero.from_flax(lambda rngs: module_of(config)(config, rngs=rngs))
