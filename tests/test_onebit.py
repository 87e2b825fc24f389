"""1-bit Adam, 0/1 Adam and 1-bit LAMB, beside NumPy ports of DeepSpeed 0.19.8.

The ports are of runtime/fp16/onebit/{adam,zoadam,lamb}.py without their first step, which only sets up buffers, and
with exact communication an average in place of `compressed_allreduce`.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.optimizers import config, train
from helpers.reference import Layout, batches, initial, model, reference
from helpers.sampling import keep
from jax.sharding import Mesh

import jzero
from experiments.benchmarks import onebit
from jzero import optimizers
from jzero.optimizers.compressed import compressed_all_reduce, is_error
from jzero.optimizers.lr_schedules import LRSchedule
from jzero.planner import collectives, gpu_devices
from jzero.planner.state_bytes import state_bytes
from jzero.tree import named

has_cuda_compiler = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))

EXACT = {"exact_communication": True}
HYPER = {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
LR, STEPS = 0.125, 40


def series(shape=(8, 16), scale=1.0):
    w, *grads = (np.random.default_rng([3, i]).normal(size=shape) for i in range(STEPS + 1))
    return scale * w, [g * 10 ** -(i / STEPS) for i, g in enumerate(grads)]  # ever smaller, so the variance shrinks


def trained(name, params, w, grads, stacked=None):
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(
            config(name, {**HYPER, **EXACT, **params}), LRSchedule(lambda count: LR), stacked=stacked
        )
        return np.asarray(train(tx, jnp.asarray(w), [jnp.asarray(g) for g in grads])[0])


@pytest.mark.parametrize("freeze", [1, 5, 1000])
def test_one_bit_adam_is_deepspeeds(freeze):
    w, grads = series()
    expected, m, v = w, 0.0, 0.0
    for step, g in enumerate(grads, start=1):
        m = 0.8 * m + 0.2 * g
        if step <= freeze:
            v = 0.95 * v + 0.05 * g * g
        expected = expected - LR * (m / (np.sqrt(v) + 1e-6) + 0.1 * expected)
    found = trained("OneBitAdam", {"freeze_step": freeze}, w, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("freeze", "scaler"), [(1000, 3), (12, 2), (1000, 16), (30, 1)])
def test_zero_one_adam_is_deepspeeds(freeze, scaler):
    w, grads = series()
    expected, m, v = w, 0.0, 0.0
    interval, counter = 1, 0
    for step, g in enumerate(grads, start=1):
        if step <= freeze and step % interval == 0:
            v = 0.95 * v + 0.05 * g * g
        m = 0.8 * m + 0.2 * g
        expected = expected - LR * (m / (np.sqrt(v) + 1e-6) + 0.1 * expected)
        if step <= freeze and step % interval == 0:
            counter += 1
            if counter == scaler:
                counter, interval = 0, 2 * interval
    found = trained("ZeroOneAdam", {"var_freeze_step": freeze, "var_update_scaler": scaler}, w, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


def lamb_reference(w, grads, freeze, decay, low, high, beta=0.7, most=3.0, least=0.6, threshold=0.05):
    m = v = fresh = ratio_average = 0.0
    last = 1.0
    for step, g in enumerate(grads, start=1):
        before = m
        m = 0.8 * m + 0.2 * g
        if step <= freeze:
            v = 0.95 * v + 0.05 * g * g
            fresh = v
            update = m / (np.sqrt(v) + 1e-6) + decay * w
            w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(update)
            coeff = min(max(w_norm / u_norm, low), high) if w_norm != 0 and u_norm != 0 else 1.0
            if coeff != 1.0:
                ratio_average = beta * ratio_average + (1 - beta) * coeff
        else:
            again = (m - before * 0.8) / (1 - 0.8)
            fresh = 0.95 * fresh + 0.05 * again * again
            size, real = np.sqrt(v) + 1e-6, np.sqrt(fresh) + 1e-6
            plain = m / size
            update, factor = plain, (size / real).max()
            if decay > 0:
                update = plain + decay * w
                part = min(1.0, np.linalg.norm(plain) / np.linalg.norm(update))
                factor = factor * part + (1.0 - part)
            factor = min(max(factor, least), most)
            factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
            last = factor
            coeff = ratio_average * factor
        w = w - LR * coeff * update
    return w, last


@pytest.mark.parametrize(
    ("freeze", "decay", "scale"), [(10, 0.1, 1.0), (10, 0.0, 1.0), (1, 0.1, 1e3), (1000, 0.1, 1.0), (10, 0.1, 0.0)]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_one_bit_lamb_is_deepspeeds(freeze, decay, scale, stacked):
    params = {
        "freeze_step": freeze, "weight_decay": decay, "max_coeff": 0.9, "min_coeff": 0.05, "coeff_beta": 0.7,
        "factor_max": 3.0, "factor_min": 0.6, "factor_threshold": 0.05,
    }  # fmt: skip
    w, grads = series((2, 8, 16), scale)
    if stacked:
        found = trained("OneBitLamb", params, w, grads, stacked=True)
        for layer in range(2):
            expected, _ = lamb_reference(w[layer], [g[layer] for g in grads], freeze, decay, 0.05, 0.9)
            np.testing.assert_allclose(found[layer], expected, rtol=1e-10, atol=1e-10)
        return
    expected, last = lamb_reference(w, grads, freeze, decay, 0.05, 0.9)
    np.testing.assert_allclose(trained("OneBitLamb", params, w, grads), expected, rtol=1e-10, atol=1e-10)
    assert (last != 1) == (freeze < STEPS)


NAMES = ("ZeroOneAdam", "OneBitLamb")


@pytest.mark.parametrize("name", NAMES)
def test_without_the_key_they_are_refused_with_the_fix(name):
    for params in ({}, {"exact_communication": False}):
        with pytest.raises(jzero.ConfigError, match="write true to run this optimizer with exact communication"):
            jzero.Config.load({"optimizer": {"type": name, "params": params}})
    with pytest.raises(jzero.ConfigError, match="comm_backend_name: 'gloo' must be "):
        jzero.Config.load({"optimizer": {"type": name, "params": {**EXACT, "comm_backend_name": "gloo"}}})


def test_the_report_names_the_fallback_and_training_works():
    params = {"lr": 1e-3, "freeze_step": 2, "bias_correction": False, "cuda_aware": True, "comm_backend_name": "mpi"}
    step = jzero.make_train_step(
        model("decoder"),
        Layout(1, 8, 1, unroll=False).config(optimizer={"type": "OneBitLamb", "params": {**params, **EXACT}}),
        mesh=Layout(1, 8, 1).mesh,
    )
    text = " ".join(jzero.report(step).split())
    assert "OneBitLamb: exact_communication is true: gradients are averaged exactly, not as signs" in text
    state = step.init(jax.random.key(0))
    for batch in batches("decoder")[:3]:
        state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))


# ------------------------------------------------------------------------------------------- compressed communication


def squeezed(x):
    """The signs of x with a scale, and what that loses."""
    signs = np.where(x >= 0, 1.0, -1.0) * np.linalg.norm(x) / np.sqrt(x.size)
    return signs, x - signs


class Servers:
    """runtime/comm/nccl.py, `compressed_allreduce`, of one parameter on `size` devices."""

    def __init__(self, elements, size):
        self.size, n = size, -(-elements // (8 * size)) * 8 * size
        self.worker, self.server = np.zeros((size, n)), np.zeros((size, n // size))

    def average(self, rows):
        """[devices, elements] -> [elements]"""
        n = self.worker.shape[1]
        sent = np.zeros((self.size, n))
        for i, row in enumerate(rows):
            sent[i], self.worker[i] = squeezed(np.pad(row, (0, n - row.size)) + self.worker[i])
        parts = sent.mean(0).reshape(self.size, -1)
        for i in range(self.size):
            parts[i], self.server[i] = squeezed(parts[i] + self.server[i])
        return parts.reshape(-1)[: rows.shape[1]]


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


CLIP, FREEZE = 0.4, 3  # below the norms of the gradients


def one_bit(layout=None, **more):
    layout = layout or Layout(0, 8, 2, unroll=False)
    params = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "freeze_step": FREEZE}
    settings = {"optimizer": {"type": "OneBitAdam", "params": params}, "gradient_clipping": CLIP, **more}
    return jzero.make_train_step(model("decoder"), layout.config(**settings), mesh=layout.mesh)


def deepspeed(steps, size=8):
    """runtime/fp16/onebit/adam.py in NumPy, every layer a parameter; the losses and the parameters."""
    params = jax.tree.map(np.float64, initial("decoder"))
    flat, tree = jax.tree.flatten(params)
    stacked = jax.tree.leaves({"ends": {"embed": False, "head": False}, "stack": {"w": True, "b": True}})
    layers = [len(w) if s else 1 for w, s in zip(flat, stacked, strict=True)]
    servers = [[Servers(w.size // n, size) for _ in range(n)] for w, n in zip(flat, layers, strict=True)]
    m, v = [np.zeros(w.shape) for w in flat], [np.zeros(w.shape) for w in flat]

    @jax.jit
    def gradient(params, part):
        def total(params):
            loss = model("decoder").loss(params, part, None)
            return loss.sum, loss.count

        return jax.value_and_grad(total, has_aux=True)(params)

    def clipped(grads):
        norm = np.sqrt(sum((g * g).sum() for g in grads))
        return [g * min(1.0, CLIP / norm) for g in grads]

    losses = []
    for step, batch in enumerate(batches("decoder")[:steps], start=1):
        parts = [jax.tree.map(lambda x, i=i: np.split(x, size)[i], batch) for i in range(size)]
        whole = jax.tree.unflatten(tree, [jnp.asarray(w, jnp.float32) for w in flat])
        results = [gradient(whole, part) for part in parts]
        count = float(sum(c for (_, c), _ in results))
        losses.append(sum(float(s) for (s, _), _ in results) / count)
        grads = [[size * np.float64(g) / count for g in jax.tree.leaves(gradient)] for _, gradient in results]
        if step <= FREEZE:
            mean = clipped([np.mean(gs, 0) for gs in zip(*grads, strict=True)])
            m = [0.8 * a + 0.2 * g for a, g in zip(m, mean, strict=True)]
            v = [0.95 * a + 0.05 * g * g for a, g in zip(v, mean, strict=True)]
        else:
            grads = [clipped(g) for g in grads]
            for k, n in enumerate(layers):
                rows = np.stack([0.8 * m[k] + 0.2 * g[k] for g in grads]).reshape(size, n, -1)
                new = [servers[k][layer].average(rows[:, layer]) for layer in range(n)]
                m[k] = np.stack(new).reshape(m[k].shape)
        flat = [w - 0.01 * (a / (np.sqrt(b) + 1e-6) + 0.1 * w) for w, a, b in zip(flat, m, v, strict=True)]
    return losses, flat


@pytest.mark.parametrize(
    "layout", keep([Layout(0, 8, 2, unroll=False), Layout(0, 4, 1, data=2)], [Layout(0, 8, 2, unroll=False)]), ids=str
)
def test_one_bit_adam_trains_as_deepspeeds(layout):
    step = one_bit(layout)
    state, found = step.init(jax.random.key(0)), []
    for batch in batches("decoder")[:7]:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    losses, params = deepspeed(7)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    # A sign that rounding turns moves an element by twice its scale; so norms of leaves.
    for a, b, start in zip(jax.tree.leaves(state.params), params, jax.tree.leaves(initial("decoder")), strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b - start)
    assert float(metrics["grad_norm"]) > CLIP


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.skipif(not has_cuda_compiler, reason="needs jzero[plan]")
def test_no_gradient_is_moved_whole_after_the_warm_up():
    """One branch all-reduces gradients, the other moves bits: n / 8 bytes twice. Outside of both there are scalars."""
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 8))
    config = Layout(0, 8, 2, unroll=False).config(
        optimizer={"type": "OneBitAdam"}, compiler_options={"xla_gpu_autotune_level": 0}
    )
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batches("decoder")[0]))
    ledger = collectives(jzero.make_train_step(model("decoder"), config, mesh=mesh).lower(batch).compile(), mesh)
    elements = [1024, 1024, 2 * 256, 2 * 64]  # the bias of a layer is padded from 16 to 64
    for kind in ("all-to-all", "all-gather"):
        assert ledger.select(kind=kind, dtype="u8", in_branch=True).bytes == sum(elements) // 8
    assert ledger.select(kind="all-reduce", in_branch=True).bytes == 4 * (1024 + 1024 + 512 + 32) + 4
    # The losses and counts of 2 micro-batches, the squares of 4 leaves; the total count.
    assert {row.kind for row in ledger.select(in_branch=False)} == {"all-reduce"}
    assert ledger.select(in_branch=False).bytes == 4 * (2 * 2 + 4) + 4


@pytest.mark.slow
def test_checkpoints_resume_to_the_bit_and_on_other_devices(tmp_path):
    def engine(layout, resume=None):
        config = {**one_bit_config(), "train_batch_size": 32}
        return jzero.initialize(model=model("decoder"), config=config, mesh=layout.mesh, resume=resume)[0]

    straight = engine(Layout(0, 8, 1))
    for batch in batches("decoder")[:5]:
        straight.train_batch(batch)
    straight.save_checkpoint(tmp_path).wait()
    again, fewer = engine(Layout(0, 8, 1)), engine(Layout(0, 4, 1), resume=tmp_path)
    again.load_checkpoint(tmp_path)
    losses = []
    for e in (again, fewer):
        losses.append([float(e.train_batch(batch)) for batch in batches("decoder")[5:7]])
    assert losses[0] == [float(straight.train_batch(batch)) for batch in batches("decoder")[5:7]]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6)  # the errors are lost: the next step differs
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-2)
    fewer.load_checkpoint(tmp_path)  # into an engine that has errors of its own
    errors = [x for name, x in named(fewer.state.opt_state).items() if is_error(name)]
    assert errors
    assert not any(np.asarray(x).any() for x in errors)


def one_bit_config():
    params = {"lr": 0.01, "freeze_step": FREEZE}
    return {"optimizer": {"type": "OneBitAdam", "params": params}, "stack": {"unroll": False}}


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


def test_the_errors_cost_4_and_4_over_n_bytes():
    """Padded to whole bytes for every server: 1,024, 1,024 and 2 x 256 elements are, 2 x 16 become 2 x 64."""
    found = state_bytes(one_bit(Layout(0, 8, 2, unroll=False)))
    elements, errors = 1024 + 1024 + 512 + 32, 1024 + 1024 + 512 + 128
    assert found.masters == 4 * elements
    assert found.optimizer == 8 * elements + 4 * errors + 4 * errors // 8 + 3 * 4  # two counts and the norm
    assert found.total == found.formula


def test_one_device_has_nothing_to_compress():
    step = one_bit(Layout(0, 1, 1))
    assert step.setup.averaging is None
    assert not any(is_error(name) for name in named(step.state_shapes))
