"""1-bit Adam, 0/1 Adam and 1-bit LAMB, beside NumPy ports of DeepSpeed 0.19.6.

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
from jzero.optimizers.compressed import compressed_all_reduce, has_rows
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


def test_a_transport_is_one_of_deepspeeds():
    with pytest.raises(jzero.ConfigError, match="comm_backend_name: 'gloo' must be "):
        jzero.Config.load({"optimizer": {"type": "ZeroOneAdam", "params": {"comm_backend_name": "gloo"}}})


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
SHARED = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
LAMB = {"coeff_beta": 0.7, "max_coeff": 2.0, "factor_max": 1.5, "factor_min": 0.9, "factor_threshold": 0.05}
# The variance learns in steps 1, 2 and 4; the devices average after steps 5, 6, 8, 9, 12.
ZERO_ONE = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 3}
PARAMS = {
    "OneBitAdam": {**SHARED, "freeze_step": FREEZE},
    "OneBitLamb": {**SHARED, "freeze_step": FREEZE, **LAMB},
    "ZeroOneAdam": {**SHARED, **ZERO_ONE},
}


RISING = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 0.02, "warmup_num_steps": 15}}
SLOW_HEAD = [{"match": "head", "lr_scale": 0.5}]


def one_bit(layout=None, name="OneBitAdam", **more):
    layout = layout or Layout(0, 8, 2, unroll=False)
    optimizer = {"type": name, "params": PARAMS[name], "groups": SLOW_HEAD}
    settings = {"optimizer": optimizer, "gradient_clipping": CLIP, **more}
    return jzero.make_train_step(model("decoder"), layout.config(**settings), mesh=layout.mesh)


def layered(tree):
    """The leaves of a tree like the decoder's parameters, every layer one of its own."""
    leaves = tree["ends"]["embed"], tree["ends"]["head"], *tree["stack"]["b"], *tree["stack"]["w"]
    return [np.float64(x) for x in leaves]


def unlayered(params):
    embed, head, *layers = (jnp.asarray(w, jnp.float32) for w in params)
    stack = {"b": jnp.stack(layers[:2]), "w": jnp.stack(layers[2:])}
    return {"ends": {"embed": embed, "head": head}, "stack": stack}


def gradients(devices, batch):
    """The loss of a global batch, and every device's gradient in the scale of the mean; both [device][parameter]."""
    size = len(devices)
    parts = [jax.tree.map(lambda x, i=i: np.split(x, size)[i], batch) for i in range(size)]
    results = [one_gradient(unlayered(params), part) for params, part in zip(devices, parts, strict=True)]
    count = float(sum(c for (_, c), _ in results))
    return sum(float(s) for (s, _), _ in results) / count, [
        [size * g / count for g in layered(gradient)] for _, gradient in results
    ]


@jax.jit
def one_gradient(params, part):
    def total(params):
        loss = model("decoder").loss(params, part, None)
        return loss.sum, loss.count

    return jax.value_and_grad(total, has_aux=True)(params)


def clipped(grads):
    norm = np.sqrt(sum((g * g).sum() for g in grads))
    return [g * min(1.0, CLIP / norm) for g in grads]


def mean(grads):
    return clipped([np.mean(gs, 0) for gs in zip(*grads, strict=True)])


def one_bit_adam(params, size):
    """runtime/fp16/onebit/adam.py: yields [device][parameter], takes gradients of that form, and rates [parameter]."""
    servers = [Servers(w.size, size) for w in params]
    m = v = [np.zeros(w.shape) for w in params]
    for step in range(1, 100):
        grads, rates = yield [params] * size
        if step <= FREEZE:
            m = [0.8 * a + 0.2 * g for a, g in zip(m, mean(grads), strict=True)]
            v = [0.95 * a + 0.05 * g * g for a, g in zip(v, mean(grads), strict=True)]
        else:
            rows = zip(*map(clipped, grads), strict=True)
            local = [np.stack([0.8 * a + 0.2 * g for g in gs]).reshape(size, -1) for a, gs in zip(m, rows, strict=True)]
            m = [s.average(r).reshape(a.shape) for s, r, a in zip(servers, local, m, strict=True)]
        params = [w - lr * (a / (np.sqrt(b) + 1e-6) + 0.1 * w) for w, a, b, lr in zip(params, m, v, rates, strict=True)]


def one_bit_lamb(params, size):
    """runtime/fp16/onebit/lamb.py, with zeros in the padding, where DeepSpeed leaves the average of the step before."""
    servers, ends = Servers(sum(w.size for w in params), size), np.cumsum([w.size for w in params])[:-1]
    m = v = fresh = [np.zeros(w.shape) for w in params]
    ratios, factors, scales = [0.0] * len(params), [1.0] * len(params), None
    for step in range(1, 100):
        grads, rates = yield [params] * size
        if step <= FREEZE:
            m = [0.8 * a + 0.2 * g for a, g in zip(m, mean(grads), strict=True)]
            v = fresh = [0.95 * a + 0.05 * g * g for a, g in zip(v, mean(grads), strict=True)]
        else:
            if scales is None:
                sizes = [np.linalg.norm(a) / np.sqrt(a.size) for a in m]
                scales = [np.mean(sizes) / size for size in sizes]
            rows = [
                np.concatenate([((0.8 * a + 0.2 * g) * s).ravel() for a, g, s in zip(m, own, scales, strict=True)])
                for own in map(clipped, grads)
            ]
            parts = np.split(servers.average(np.stack(rows)), ends)
            before, m = m, [x.reshape(a.shape) / s for x, a, s in zip(parts, m, scales, strict=True)]
            again = [(new - old * 0.8) / (1 - 0.8) for new, old in zip(m, before, strict=True)]
            fresh = [0.95 * a + 0.05 * g * g for a, g in zip(fresh, again, strict=True)]
        new = []
        for i, w in enumerate(params):
            size_ = np.sqrt(v[i]) + 1e-6
            plain = m[i] / size_
            update = plain + 0.1 * w
            u_norm = np.linalg.norm(update)
            if step <= FREEZE:
                coeff = min(max(np.linalg.norm(w) / u_norm, 0.01), 2.0) if np.linalg.norm(w) and u_norm else 1.0
                if coeff != 1.0:
                    ratios[i] = 0.7 * ratios[i] + (1 - 0.7) * coeff
            else:
                part = min(1.0, np.linalg.norm(plain) / u_norm)
                factor = (size_ / (np.sqrt(fresh[i]) + 1e-6)).max() * part + 1 - part
                factor = min(max(factor, 0.9), 1.5)
                factors[i] = min(max(factor, factors[i] * 0.95), factors[i] * 1.05)
                coeff = ratios[i] * factors[i]
            new.append(w - rates[i] * coeff * update)
        params = new


def zero_one_adam(params, size):
    """runtime/fp16/onebit/zoadam.py: from step 5 on every device has parameters and a momentum of its own."""
    n, servers = len(params), [Servers(w.size, size) for w in params]
    devices, m, v = [params] * size, [[np.zeros(w.shape) for w in params]] * size, [np.zeros(w.shape) for w in params]
    interval, updates, local_interval, local_steps, summed = 1, 0, 1, 0, np.zeros(n)
    buffers = [[np.zeros(w.shape) for w in params]] * size

    def average(rows):
        return [servers[j].average(np.stack([r[j].ravel() for r in rows])).reshape(rows[0][j].shape) for j in range(n)]

    for step in range(1, 100):
        grads, rates = yield devices
        frozen, learns = step > ZERO_ONE["var_freeze_step"], step % interval == 0
        if frozen:
            own = list(map(clipped, grads))
        elif learns:
            own = [mean(grads)] * size
            v = [0.95 * a + 0.05 * g * g for a, g in zip(v, own[0], strict=True)]
        else:
            # DeepSpeed's has a momentum where the variance is 0 as well: in step 3, of a token that step 4 shows first.
            sums = average(list(map(clipped, grads)))
            own = [[np.where(b > 0, g, 0.0) for g, b in zip(sums, v, strict=True)]] * size
        m = [[0.8 * a + 0.2 * g for a, g in zip(old, new, strict=True)] for old, new in zip(m, own, strict=True)]
        denominators = [np.sqrt(a) + 1e-6 for a in v]
        updates_ = [
            [-lr * (a / d + 0.1 * w) for a, d, w, lr in zip(momenta, denominators, here, rates, strict=True)]
            for momenta, here in zip(m, devices, strict=True)
        ]
        devices = [[w + u for w, u in zip(*pair, strict=True)] for pair in zip(devices, updates_, strict=True)]
        if not frozen:
            updates += learns
            if updates == ZERO_ONE["var_update_scaler"]:
                updates, interval = 0, 2 * interval
            if step == ZERO_ONE["var_freeze_step"]:
                servers = [Servers(w.size, size) for w in params]
            continue
        summed = summed + rates
        buffers = [[b + u for b, u in zip(*pair, strict=True)] for pair in zip(buffers, updates_, strict=True)]
        if step % local_interval == 0:
            start = [w - b for w, b in zip(devices[0], buffers[0], strict=True)]
            sums = average([[b * d for b, d in zip(buffer, denominators, strict=True)] for buffer in buffers])
            m = [[-x / lr for x, lr in zip(sums, summed, strict=True)]] * size
            devices = [[w + x / d for w, x, d in zip(start, sums, denominators, strict=True)]] * size
            buffers, summed = [[np.zeros(w.shape) for w in params]] * size, np.zeros(n)
        local_steps += 1
        if local_steps == ZERO_ONE["local_step_scaler"]:
            local_steps, local_interval = 0, min(ZERO_ONE["local_step_clipper"], 2 * local_interval)


STEPS_OF = {"OneBitAdam": (one_bit_adam, 7), "OneBitLamb": (one_bit_lamb, 7), "ZeroOneAdam": (zero_one_adam, 12)}
EIGHT, HSDP = Layout(0, 8, 2, unroll=False), Layout(0, 4, 1, data=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    keep([(n, x) for n in PARAMS for x in (EIGHT, HSDP)], [(n, EIGHT) for n in PARAMS]),
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
@pytest.mark.skipif(not has_cuda_compiler, reason="needs jzero[plan]")
@pytest.mark.parametrize("name", keep(PADDED, ["ZeroOneAdam"]))
def test_no_gradient_is_moved_whole_after_the_warm_up(name):
    """One branch all-reduces gradients, the other moves bits: n / 8 bytes twice. Outside of both there are scalars.

    In 0/1 Adam two branches move bits, and one nothing.
    """
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 8))
    config = Layout(0, 8, 2, unroll=False).config(
        optimizer={"type": name}, compiler_options={"xla_gpu_autotune_level": 0}
    )
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batches("decoder")[0]))
    ledger = collectives(jzero.make_train_step(model("decoder"), config, mesh=mesh).lower(batch).compile(), mesh)
    bits = 2 if name == "ZeroOneAdam" else 1
    for kind in ("all-to-all", "all-gather"):
        assert ledger.select(kind=kind, dtype="u8", in_branch=True).bytes == bits * sum(PADDED[name]) // 8
    assert ledger.select(kind="all-reduce", in_branch=True).bytes == 4 * (1024 + 1024 + 512 + 32)
    # The losses and counts of 2 micro-batches, the squares of 4 leaves, of the norms; the total count.
    assert {row.kind for row in ledger.select(in_branch=False)} == {"all-reduce"}
    assert ledger.select(in_branch=False).bytes == 4 * (2 * 2 + 4 + 1) + 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
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
    rows = [x for name, x in named(fewer.state.opt_state).items() if has_rows(name)]
    assert rows
    assert not any(np.asarray(x).any() for x in rows)
    alone = engine(Layout(0, 1, 1), resume=tmp_path)  # which has no rows
    assert float(alone.train_batch(batches("decoder")[5])) == pytest.approx(at_the_last_average, rel=1e-6)
    alone.save_checkpoint(tmp_path / "alone").wait()
    straight.load_checkpoint(tmp_path / "alone")
    assert np.isfinite(float(straight.train_batch(batches("decoder")[6])))


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
    found = named(one_bit(name=name, bf16=bf16).state_shapes.opt_state)
    assert {x.dtype for name, x in found.items() if has_rows(name)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for name, x in found.items() if "mu" in name.split("/")} == {jnp.dtype(jnp.bfloat16)}


def test_one_device_has_nothing_to_compress():
    step = one_bit(Layout(0, 1, 1))
    assert step.setup.averaging is None
    assert not any(has_rows(name) for name in named(step.state_shapes))


def test_the_rate_of_steps_alone_is_a_schedules():
    with pytest.raises(jzero.ConfigError, match="ZeroOneAdam sums the rates of the steps between two averages"):
        one_bit(name="ZeroOneAdam").set_lr(0.1)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", PARAMS)
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
