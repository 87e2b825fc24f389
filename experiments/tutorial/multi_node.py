"""ZeRO-3 with one process per GPU, on one host or many: the same script everywhere.

jzero --platform cpu --num_gpus 4 experiments/tutorial/multi_node.py     four processes on this machine, no GPU needed
jzero --hostfile hostfile experiments/tutorial/multi_node.py             every GPU of every host in the file

For Slurm, MPI, Kubernetes and Colab, see docs/clusters.md.
"""

import argparse
from pathlib import Path

import jzero
from experiments.tutorial import digits
from models.mlp import MLP, cross_entropy

CONFIG = Path(__file__).with_name("ds_config_zero3.json")


def main(epochs: int = 15) -> float:
    jzero.init_distributed()  # initialize() calls it too; here, so that the next line reports who joined
    jzero.log_dist(f"one of {jzero.get_world_size()} processes", ranks=[-1])
    train, test = digits.load()  # every process loads all of it and trains on its part

    model = jzero.from_flax(MLP, cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    for epoch in range(1, epochs + 1):
        losses = [float(engine.train_batch(batch)) for batch in loader]
        jzero.log_dist(f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}")

    kernel = engine.state.params["fc1"]["kernel"]
    held = [shard.data.shape for shard in kernel.addressable_shards]
    jzero.log_dist(f"of fc1/kernel {kernel.shape} its devices hold {held}", ranks=[-1])

    loss = float(engine.eval_batch(tuple(x[:320] for x in test)))
    jzero.log_dist(f"test loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, help="given by the launcher; jzero.get_local_rank() says the same")
    parser.add_argument("--epochs", type=int, default=15)
    main(parser.parse_args().epochs)
