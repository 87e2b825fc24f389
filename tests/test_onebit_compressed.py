"""1-bit Adam, 0/1 Adam and 1-bit LAMB with compressed communication, beside the ports of `helpers.onebit`."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.onebit import (
    CLIP,
    EXACT,
    HYPER,
    PARAMS,
    RISING,
    STEPS_OF,
    Servers,
    gradients,
    layered,
    one_bit,
)  # fmt: skip
from helpers.optimizers import config
from helpers.reference import Layout, batches, initial, model, reference
from helpers.sampling import keep, sample, some
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jzero
from experiments.benchmarks import onebit
from jzero import optimizers
from jzero.optimizers.compressed import compressed_all_reduce, rows_of
from jzero.optimizers.lr_schedules import LRSchedule
from jzero.planner import collectives, gpu_devices
from jzero.planner.state_bytes import state_bytes
from jzero.tree import named


def test_the_compressed_all_reduce_is_deepspeeds():
    size, n = 8, 500  # padded to 512
    servers, rng = Servers(n, size), np.random.default_rng(0)
    worker, server = jnp.zeros((size, 512)), jnp.zeros((size, 64))
    run = onebit.program(
        partial(compressed_all_reduce, axes=onebit.AXIS), Mesh(np.array(jax.devices()), onebit.AXIS), 3
    )
    for _ in range(3):
        rows = rng.normal(size=(size, n)).astype(np.float32)
        found, worker, server = run(jnp.asarray(rows), worker, server)
        np.testing.assert_allclose(found, np.tile(servers.average(rows), (size, 1)), rtol=1e-4)
        np.testing.assert_allclose(worker, servers.worker, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(server, servers.server, rtol=1e-4, atol=1e-5)


EIGHT, HSDP = Layout(0, 8, 2, unroll=False), Layout(0, 4, 1, data=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    keep([(n, x) for n in PARAMS for x in (EIGHT, HSDP)], [("OneBitLamb", EIGHT)]),
    ids=str,
)
def test_compressed_optimizers_train_as_deepspeeds(name, layout):
    step = one_bit(layout, name, scheduler=RISING)
    state = step.init(jax.random.key(0))
    start, (oracle, steps) = layered(initial("decoder")), STEPS_OF[name]
    oracle = oracle(start, size=8)
    devices = next(oracle)
    for batch in (batches("decoder") * 2)[:steps]:
        loss, grads = gradients(devices, batch)
        alone = float(step.micro_loss(state, batch, 0)) if layout.accum == 1 else loss
        state, metrics = step(state, batch)
        rate = float(metrics["lr"])
        devices = oracle.send((grads, np.array([rate, 0.5 * rate, *[rate] * 4])))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(metrics["loss"]) == pytest.approx(alone, rel=1e-5)
    # A sign that rounding turns moves an element by twice its scale; so norms of leaves.
    for a, b, w in zip(layered(state.params), devices[0], start, strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b - w)
    assert float(metrics["grad_norm"]) > CLIP


LEAVES = 1024, 1024, 2 * 256, 2 * 64  # the bias of a layer is padded from 16 to 64
PADDED = {"OneBitAdam": LEAVES, "OneBitLamb": (2624,), "ZeroOneAdam": LEAVES}


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("no_compilation_cache")
@needs_cuda_compiler
@pytest.mark.parametrize("name", some(PADDED, ["ZeroOneAdam"]))
def test_no_gradient_is_moved_whole_after_the_warm_up(name):
    """One branch all-reduces gradients, the other moves bits: n / 8 bytes twice. Outside of both there are scalars.

    In 0/1 Adam two branches move bits, and one nothing.
    """
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 8))
    config = Layout(0, 8, 2, unroll=False).config(
        optimizer={"type": name}, compiler_options={"xla_gpu_autotune_level": 0}
    )
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batches("decoder")[0]))
    program = collectives(jzero.make_train_step(model("decoder"), config, mesh=mesh).lower(batch).compile(), mesh)
    bits = 2 if name == "ZeroOneAdam" else 1
    for kind in ("all-to-all", "all-gather"):
        assert program.select(kind=kind, dtype="u8", in_branch=True).bytes == bits * sum(PADDED[name]) // 8
    assert program.select(kind="all-reduce", in_branch=True).bytes == 4 * (1024 + 1024 + 512 + 32)
    # The losses and counts of 2 micro-batches, the squares of 4 leaves, of the norms; the total count.
    assert {row.kind for row in program.select(in_branch=False)} == {"all-reduce"}
    assert program.select(in_branch=False).bytes == 4 * (2 * 2 + 4 + 1) + 4


@pytest.mark.parametrize("name", some(PARAMS, ["OneBitLamb"]))
def test_checkpoints_resume_to_the_bit_and_on_other_devices(name, tmp_path):
    # 0/1 Adam's devices are alone in steps 5, 6 and 7: the checkpoint is in the middle.
    resumed = {"ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}}

    def engine(layout, resume=None):
        optimizer = {"type": name, "params": {**PARAMS[name], **resumed.get(name, {})}}
        config = {"optimizer": optimizer, "stack": {"unroll": False}, "train_batch_size": 32}
        return jzero.initialize(model=model("decoder"), config=config, mesh=layout.mesh, resume=resume)[0]

    straight = engine(Layout(0, 8, 1))
    for batch in batches("decoder")[:5]:
        straight.train_batch(batch)
    straight.save_checkpoint(tmp_path).wait()
    at_the_last_average = float(straight.eval_batch(batches("decoder")[5]))
    again, fewer = engine(Layout(0, 8, 1)), engine(Layout(0, 4, 1), resume=tmp_path)
    again.load_checkpoint(tmp_path)
    losses = []
    for e in (again, fewer):
        losses.append([float(e.train_batch(batch)) for batch in batches("decoder")[5:7]])
    assert losses[0] == [float(straight.train_batch(batch)) for batch in batches("decoder")[5:7]]
    assert losses[1][0] == pytest.approx(at_the_last_average, rel=1e-6)  # the rows are lost: the next step differs
    if name == "ZeroOneAdam":
        assert abs(losses[1][0] - losses[0][0]) > 1e-3  # with their own steps, the devices were elsewhere
    else:
        assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-2)
    fewer.load_checkpoint(tmp_path)  # into an engine that has rows of its own
    rows, state = rows_of(fewer.state.opt_state), named(fewer.state.opt_state)
    assert rows
    assert not any(np.asarray(state[name]).any() for name in rows)
    alone = engine(Layout(0, 1, 1), resume=tmp_path)  # which has no rows
    assert float(alone.train_batch(batches("decoder")[5])) == pytest.approx(at_the_last_average, rel=1e-6)
    alone.save_checkpoint(tmp_path / "alone").wait()
    straight.load_checkpoint(tmp_path / "alone")
    assert np.isfinite(float(straight.train_batch(batches("decoder")[6])))


@pytest.mark.slow
def test_a_run_goes_on_with_exact_communication_and_back(tmp_path, capsys):
    def engine(exact):
        params = {**PARAMS["OneBitAdam"], "exact_communication": exact}
        config = {"optimizer": {"type": "OneBitAdam", "params": params}, "train_batch_size": 32}
        return jzero.initialize(model=model("decoder"), config=config, mesh=EIGHT.mesh)[0]

    compressed, exact = engine(False), engine(True)
    fields = "state of single devices (server_error, worker_error)"
    for batch in batches("decoder")[:4]:
        compressed.train_batch(batch)
    for start, end, line in (
        (compressed, exact, f"{fields} is not in this run: it is dropped"),
        (exact, compressed, f"{fields} is not in the checkpoint: it starts at 0"),
    ):
        start.save_checkpoint(tmp_path / str(end.global_steps)).wait()
        end.load_checkpoint(tmp_path / str(end.global_steps))
        assert line in capsys.readouterr().out.splitlines()
        for part in ("params", "opt_state"):
            before, after = named(getattr(start.state, part)), named(getattr(end.state, part))
            both = before.keys() & after.keys()
            assert len(both) >= 4
            for name in both:
                np.testing.assert_array_equal(before[name], after[name])
        end.train_batch(batches("decoder")[end.global_steps])
    assert "single devices" not in capsys.readouterr().out


def test_a_module_named_as_a_field_of_rows_is_a_parameter():
    class Named:
        def init(self, rng):
            return {"own_norm": {"kernel": jnp.ones((8, 4))}}

        def loss(self, params, batch, rng):
            return jnp.mean((batch["x"] @ params["own_norm"]["kernel"]) ** 2)

    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    step = jzero.make_train_step(Named(), Layout(1, 8, 1).config(optimizer={"type": "Adam"}, bf16=bf16))
    assert rows_of(step.state_shapes) == []
    shapes, specs = named(step.state_shapes), named(step.state_specs)
    moments = [name for name in shapes if name.startswith("opt_state/") and name.endswith("own_norm/kernel")]
    assert len(moments) == 2
    assert {specs[name] for name in moments} == {specs["params/own_norm/kernel"]} == {P("zero")}
    assert {shapes[name].dtype for name in moments} == {jnp.dtype(jnp.bfloat16)}


def in_effect(layout, name="OneBitAdam", **params):
    step = one_bit(layout, optimizer={"type": name, "params": {**PARAMS[name], **params}})
    report = re.search(r"^In effect\n(.*?)(?:\n\n|\Z)", jzero.report(step), re.M | re.S)[1]
    return [line.replace("\n    ", " ") for line in report.removeprefix("  - ").split("\n  - ")]


@pytest.mark.parametrize("name", PARAMS)
def test_the_report_tells_what_runs(name):
    signs = f"{name}: after "
    lines = in_effect(EIGHT, name)
    assert any(line.startswith(signs) for line in lines)
    clip = "gradient_clipping 0.4: by global norm"
    assert f"{clip} where gradients are averaged exactly, elsewhere each device's own by its norm, as in DeepSpeed" in (
        lines
    )
    for other in (in_effect(EIGHT, name, exact_communication=True), in_effect(Layout(0, 1, 1), name)):
        assert clip in other
        assert not any(line.startswith(signs) for line in other)


def test_the_report_lists_parameters_without_effect_if_they_are_given():
    text = "\n".join(in_effect(EIGHT))
    assert "no bias is corrected, as in DeepSpeed" in text
    for name in ("bias_correction", "cuda_aware", "comm_backend_name"):
        assert name not in text
    text = "\n".join(in_effect(EIGHT, bias_correction=True, cuda_aware=False))
    assert "OneBitAdam: bias_correction has no effect: DeepSpeed reads it too, and corrects nothing" in text
    assert "OneBitAdam: cuda_aware has no effect: it chooses a transport in DeepSpeed" in text
    assert "comm_backend_name" not in text


@pytest.mark.slow
def test_gradients_are_whole_outside_of_the_optimizer():
    step = one_bit()
    gradients, metrics = step.gradients(step.init(jax.random.key(0)), batches("decoder")[0])
    assert float(metrics["grad_norm"]) == pytest.approx(reference("decoder").norms[0], rel=1e-5)
    assert [g.shape for g in jax.tree.leaves(gradients)] == [w.shape for w in jax.tree.leaves(initial("decoder"))]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero_optimization": {"stage": 1}}, ["zero_optimization.stage = 1", "needs zero_optimization.stage 0"]),
        ({"mesh": {"pipe": 2}}, ["mesh.pipe = 2", "exact_communication: true"]),
    ],
)
def test_compression_needs_all_gradients_on_every_device(more, words):
    with pytest.raises(jzero.ConfigError) as error:
        jzero.Config.load({"optimizer": {"type": "OneBitAdam"}, **more})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", PADDED)
def test_the_errors_cost_4_and_4_over_n_bytes(name):
    """Padded to whole bytes for every server: every layer, in 1-bit LAMB all together.

    1-bit LAMB has three scalars of every layer, 0/1 Adam two more numbers per parameter and the sum of rates.
    """
    found = state_bytes(one_bit(Layout(0, 8, 2, unroll=False), name))
    elements, errors = 1024 + 1024 + 512 + 32, sum(PADDED[name])
    assert found.masters == 4 * elements
    ours = {"OneBitAdam": 8 * elements, "OneBitLamb": 12 * elements + 3 * 6 * 4, "ZeroOneAdam": 16 * elements + 4}[name]
    assert found.optimizer == ours + 4 * errors + 4 * errors // 8 + 3 * 4  # two counts and the norm
    assert found.total == found.formula


@pytest.mark.parametrize("name", PARAMS)
def test_rows_stay_in_float32_beside_bfloat16_moments(name):
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    shapes = one_bit(name=name, bf16=bf16).state_shapes.opt_state
    found, rows = named(shapes), rows_of(shapes)
    assert {found[name].dtype for name in rows} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for name, x in found.items() if "mu" in name.split("/")} == {jnp.dtype(jnp.bfloat16)}


def test_one_device_has_nothing_to_compress():
    step = one_bit(Layout(0, 1, 1))
    assert step.setup.averaging is None
    assert rows_of(step.state_shapes) == []


def test_the_rate_of_steps_alone_is_a_schedules():
    with pytest.raises(jzero.ConfigError, match="ZeroOneAdam sums the rates of the steps between two averages"):
        one_bit(name="ZeroOneAdam").set_lr(0.1)


@pytest.mark.parametrize(("name", "exact"), sample(product(PARAMS, [False, True]), strength=1))
def test_rows_without_a_variance_take_no_step_but_decays(name, exact):
    """The embeddings of tokens not seen until the variance is frozen; in exact communication they are seen then."""
    replicas = None if exact else optimizers.Replicas(jzero.make_mesh(), ("zero",))
    decay = 0.0 if name == "OneBitLamb" else 0.1  # LAMB scales the decay too
    settings = {**PARAMS[name], **(EXACT if exact else {}), "weight_decay": decay}
    rng, unseen = np.random.default_rng(0), np.arange(16)[:, None] >= 10
    params = {"embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    tx = optimizers.make_optimizer(
        config(name, settings), LRSchedule(lambda count: 0.01), stacked=None, replicas=replicas
    )
    update, state, start = jax.jit(tx.update), tx.init(params), params
    for i in range(12):  # the last is one after which 0/1 Adam averages
        g = rng.normal(size=(16, 8) if exact else (8, 16, 8)).astype(np.float32)
        g = np.where(unseen & (not exact or i < 4), 0.0, g)
        updates, state = update({"embed": jnp.asarray(g)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    decayed = start["embed"] * (1 - 0.01 * decay) ** 12
    np.testing.assert_allclose(params["embed"][10:], decayed[10:], rtol=1e-5)
    assert 1e-3 < np.abs(params["embed"] - decayed)[:10].max() < 1


@pytest.mark.parametrize("name", PARAMS)
def test_state_keeps_its_dtypes_under_x64(name):
    with jax.enable_x64(True):
        replicas = optimizers.Replicas(jzero.make_mesh(), ("zero",))
        rate = LRSchedule(lambda count: jnp.float64(0.01))
        tx = optimizers.make_optimizer(config(name, PARAMS[name]), rate, stacked=None, replicas=replicas)
        params = {"w": jnp.ones(16, jnp.float32)}
        state = tx.init(params)
        _, after = jax.eval_shape(tx.update, {"w": jnp.ones((8, 16), jnp.float32)}, state, params)
    dtypes = {name: x.dtype for name, x in named(state).items()}
    assert dtypes == {name: x.dtype for name, x in named(after).items()}
    assert set(dtypes.values()) == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_steps_without_a_rate_keep_the_momentum():
    """Their sum, over 0, does not show it; DeepSpeed divides."""
    replicas = optimizers.Replicas(jzero.make_mesh(), ("zero",))
    params, g = {"w": jnp.ones(16)}, np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    tx = optimizers.make_optimizer(
        config("ZeroOneAdam", {**HYPER, "var_freeze_step": 1}), LRSchedule(lambda count: 0.0), stacked=None,
        replicas=replicas,
    )  # fmt: skip
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(3):  # the variance learns; then two averages
        updates, state = update({"w": jnp.asarray(g)}, state, params)
        assert not np.asarray(updates["w"]).any()
    expected = 0.8 * (0.8 * 0.2 * g.sum(0) + 0.2 * 8 * g) + 0.2 * 8 * g
    np.testing.assert_allclose(state.mu["w"] + state.own_mu["w"], expected, rtol=1e-5)
