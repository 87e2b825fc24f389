"""The comparison of replicas. The oracle is the fault: each test changes one bit on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.engines import build, config, rows

import jzero
import jzero.run.diagnosis.step_checks
import jzero.tree
from jzero.planner import gpu_devices

EVERY = {"desync_check": {"every": 2}}


def flip(x, number):
    """Flip the lowest bit of one element of one device's part."""
    shards = x.addressable_shards
    parts = [np.array(shard.data) for shard in shards]
    bits = parts[number].reshape(-1).view(np.uint32)
    bits[len(bits) // 2] ^= 1
    copies = [jax.device_put(part, shard.device) for part, shard in zip(parts, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "replicas differ" in line]


def train(engine, steps):
    for i in range(steps):
        engine.train_batch(rows(i))


def test_one_bit_on_one_device(capsys):
    """Of a parameter, a moment and a counter; with two copies there is no majority."""
    engine = build(1, more=EVERY, data=2, zero=2)[0]
    train(engine, 5)
    assert lines(capsys) == []
    state, replicas = engine.state, engine._checks._replicas
    leaves, tree = jax.tree.flatten(state.opt_state)
    names = [name for name in jzero.tree.named(state) if name.startswith("opt_state/")]
    where = next(i for i, name in enumerate(names) if name.endswith("stack/w"))
    leaves[where] = flip(leaves[where], 1)
    step, opt_state = flip(state.step, 3), jax.tree.unflatten(tree, leaves)
    changed = jzero.TrainState(step, state.params, opt_state, state.loss_scale, state.rng, names=state.names)
    found = replicas.differing(np.asarray(replicas.sums(changed)))
    assert found == [f"{names[where]} on device 1 (process 0), device 3 (process 0)", "step on device 3 (process 0)"]
    state.params["stack"]["w"] = flip(state.params["stack"]["w"], 2)
    engine._checks.restart()
    train(engine, 3)  # the sixth step is compared, and read after the seventh
    (said,) = lines(capsys)
    assert said.startswith("jzero: step 6: replicas differ: ")
    assert "params/stack/w on device 0 (process 0), device 2 (process 0)" in said


def test_parts_of_their_own_are_not_compared(capsys):
    engine = build(3, more=EVERY, zero=4)[0]
    engine.state.params["stack"]["w"] = flip(engine.state.params["stack"]["w"], 2)
    replicas = engine._checks._replicas
    assert replicas.differing(np.asarray(replicas.sums(engine.state))) == []


def test_a_save_reports_what_the_last_step_found(tmp_path, capsys):
    engine = build(0, data=4, zero=1, more=EVERY)[0]
    train(engine, 1)
    engine.state.params["stack"]["w"] = flip(engine.state.params["stack"]["w"], 2)
    train(engine, 1)
    assert lines(capsys) == []
    engine.save_checkpoint(tmp_path).wait()
    (said,) = lines(capsys)
    assert said.startswith("jzero: step 2: replicas differ: ")
    train(engine, 2)
    engine.load_checkpoint(tmp_path)  # the checksums of step 4 belong to the state that it replaces
    train(engine, 1)
    assert lines(capsys) == []


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_comparison_needs_no_memory():
    step = jzero.make_train_step(Wide(), config(0), mesh=jzero.make_mesh(devices=gpu_devices("h100", 2)))
    sums = jzero.run.diagnosis.step_checks.Replicas(step, None).sums
    shapes = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), step.state_shapes, step.state_shardings)
    memory = sums.lower(shapes).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 3 * 4 * 2**20
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.01 * memory.argument_size_in_bytes


class Wide:
    def init(self, rng):
        return {"w": jnp.zeros((1024, 1024))}

    def loss(self, params, batch, rng):
        return (batch @ params["w"]).mean()
