"""The 1-bit optimizers with compressed communication: settings, and NumPy ports of DeepSpeed 0.19.6.

The ports are of runtime/fp16/onebit/{adam,zoadam,lamb}.py without their first step, which only sets up buffers, and of
`compressed_allreduce` in runtime/comm/nccl.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.reference import Layout, model

import jzero

EXACT = {"exact_communication": True}
HYPER = {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}


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
