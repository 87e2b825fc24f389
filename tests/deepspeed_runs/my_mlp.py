"""The model of the stored checkpoints, as `--model my_mlp:make_model` names it."""

import stored_runs


def make_model():
    return stored_runs.make_model("mlp")
