"""Fuzzers: whatever is read from elsewhere loads, or is refused in one line within a second.

Case N of a fuzzer is made from the seed N, so a failure's number repeats it. The default run has up to a few hundred
cases of each fuzzer, `-m slow` thousands, or as many as the environment variable FUZZ says.
"""

import concurrent.futures
import contextlib
import copy
import functools
import json
import os
import random
import shutil
import socket
import string
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.configs import TUTORIAL_ZERO3
from launcher.jobs import call

import jzero
from jzero import checkpoint, ledger
from jzero.config import Config
from jzero.display.page import styled
from jzero.distributed.joining import meet
from jzero.distributed.place import find_place, slurm_hosts
from jzero.errors import CheckpointError
from jzero.launcher import environment, hostfile
from jzero.ledger import schema
from jzero.optimizers import lr_schedules, table
from jzero.plots import history, run_plots
from jzero.plots.history import METRICS

FUZZERS = {}  # name -> (function, cases in the default run, cases under -m slow)


def fuzzer(few, many):
    """Register `function(random, folder)`, which makes one case and runs it."""

    def register(function):
        FUZZERS[function.__name__] = (function, few, int(os.environ.get("FUZZ", many)))
        return function

    return register


def fuzz(name, cases, folder):
    jax.random.key(0)  # starts JAX
    refused = 0
    for number in range(cases):
        started, error = time.thread_time(), None
        try:
            FUZZERS[name][0](random.Random(number), folder)
        except (jzero.ConfigError, CheckpointError) as answer:
            error = answer
        except Exception as fault:
            raise AssertionError(f"case {number} of {name}: {fault!r}") from fault
        took = time.thread_time() - started
        assert took < 1, f"case {number} of {name} took {took:.1f} s"
        if error:
            refused += 1
            assert is_short(error), f"case {number} of {name}: {error}"
    print(f"{name}: {cases} cases, {refused} refused")
    assert cases // 50 < refused < cases - cases // 50  # a fuzzer that is always refused tests little


def is_short(error):
    """Return whether each problem is one printable line of at most about 2,000 characters."""
    lines, problems = str(error).splitlines(), getattr(error, "problems", [error])
    str(error).encode()
    return len(lines) == min(len(problems), 21) and max(map(len, lines)) < 2100


HOSTILE = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**30, -(10**400), 1e-320, 1e308, float("inf"), float("nan"),
    "", "auto", "none", "\0", "\ud800", "\u202e", "a\nb", "../../x", "~", "/dev/zero", "1e400", "9" * 5000, "x" * 10**5,
    [], {}, [[]], [{}], {"": 1}, {"a": {"b": {"c": {}}}}, ["("], ["(" * 3000], ["(a+)+$", "[[a", "a{99999999999}"],
    {"enabled": True}, {"type": "Adam"}, {"stage": 3}, b"bytes", object(), {1: 2}, {(1, 2): 3}, {None: None},
]  # fmt: skip


def cut(r, data):
    """Change a few bytes or characters: delete, repeat, replace, truncate, insert."""
    for _ in range(r.choice([0, 1, 1, 1, 2, 5])):
        at, n = r.randrange(len(data) + 1), r.choice([1, 1, 2, 8, 40])
        other = data[: r.randrange(len(data) + 1)][-n:]
        data = r.choice([
            data[:at] + data[at + n :], data[:at] + data[at : at + n] * r.choice([2, 3, 200]) + data[at + n :],
            data[:at] + other + data[at + len(other) :], data[:at], data[:at] + other + data[at:],
        ])  # fmt: skip
    return data


def garbled(r, text, alphabet):
    """Cut a text, and put characters of `alphabet` in some places."""
    text = cut(r, text)
    for _ in range(r.choice([0, 1, 2, 4])):
        at = r.randrange(len(text) + 1)
        text = text[:at] + r.choice(alphabet) + text[at + r.choice([0, 1]) :]
    return text


def places(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(found for key, child in items for found in places(child, (*path, key)))]


CONFIG = TUTORIAL_ZERO3 | {
    "gradient_clipping": 1.0, "fp16": {"enabled": False, "initial_scale_power": 16}, "checkpoint": {"dir": "runs"},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "activation_checkpointing": {"policy": "full"}, "mesh": {"data": 2, "zero": -1}, "pipeline": {"stages": None},
    "frozen_parameters": ["embed.*"], "compiler_options": {"xla_flag": True}, "seed": 7, "wandb": {"enabled": False},
    "aio": {"block_size": 1048576}, "timers": {"throughput": {"enabled": True}},
}  # fmt: skip


@fuzzer(few=200, many=10_000)
def configs(r, folder):
    data = json.loads(json.dumps(CONFIG))
    for _ in range(r.choice([0, 1, 1, 2, 5])):
        *path, key = r.choice(places(data)[1:])
        node = data
        for step in path:
            node = node[step]
        match r.randrange(4):
            case 0:
                node[key] = r.choice(HOSTILE)
            case 1:
                node.pop(key)
            case 2 if isinstance(node, dict):
                node[garbled(r, str(key), string.printable + "\0\ud800\u2028")] = node.pop(key)
            case _:
                node[key] = json.loads(json.dumps(CONFIG[r.choice(list(CONFIG))]))
    if r.random() < 0.5:
        text = json.dumps(data, default=repr, skipkeys=True, indent=r.choice([None, 1]))
        if r.random() < 0.3:
            text = text.replace('"', r.choice(["", "'", "'''"]))  # hjson
        file = folder / "config.json"
        text = garbled(r, text, "{}[]\",:'/*#\n\\0e-.\0\ud800\u2028")
        file.write_bytes(text.encode("utf-8", r.choice(["surrogatepass", "replace"])))
        data = file
    config = Config.load(data)
    repr(config)
    config.mesh_degrees(8)
    config.batch(8)


OPTAX = [
    "b1", "b2", "eps", "momentum", "decay", "init_value", "end_value", "transition_steps", "decay_rate", "peak_value",
    "warmup_steps", "decay_steps", "alpha", "exponent", "boundaries_and_scales",
]  # fmt: skip
OPTIMIZERS = {name: list(row.params) for name, row in table.DEEPSPEED.items()}
OPTIMIZERS |= dict.fromkeys([*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER], OPTAX)
SCHEDULES = {name: list(row.params) for name, row in lr_schedules._DEEPSPEED.items()}
SCHEDULES |= dict.fromkeys(lr_schedules.OPTAX_SCHEDULES, OPTAX)
PLAUSIBLE = [0.1, 1e-3, 0.9, 1, 10, 100, [0.9, 0.99], "linear", {"1": 0.5}]


LINEAR = SimpleNamespace(
    init=lambda rng: {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)},
    loss=lambda params, batch, rng: jnp.mean(batch @ params["w"] + params["b"]),
)


@fuzzer(few=100, many=2000)
def steps(r, folder):
    def chosen(known, **params):
        name = r.choice(list(known))
        for key in r.sample(known[name], r.choice([0, 0, 1, 2])):
            params[key] = r.choice(r.choice([HOSTILE, PLAUSIBLE, PLAUSIBLE]))
        return {"type": name, "params": params}

    config = {"train_batch_size": 8, "optimizer": chosen(OPTIMIZERS, lr=1e-3)}
    if r.random() < 0.5:
        config["scheduler"] = chosen(SCHEDULES)
    if r.random() < 0.3:
        config[r.choice(list(CONFIG))] = r.choice([*HOSTILE, {"pipe": 2}, {"stages": 2, "chunks": 10**8}])
    jzero.make_train_step(LINEAR, config)


HOSTS = "worker-1 slots=8  # the first\nworker-2 slots=4\n10.0.0.7 slots=2\n[fe80::1] slots=1\n"
INSIDE = "@:,=-#[] 0199\t\n\0\u0668\u2028\ud800(x)"
VARIABLES = [
    {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"},
    {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[08-10,12]", "SLURM_JOB_ID": "77",
     "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
]  # fmt: skip
SHARED = "# shared\nNCCL_DEBUG=INFO\nexport HF_HOME = /data/hf\nXLA_FLAGS=--a=1 --b=2\n\nEMPTY=\n"


@fuzzer(few=300, many=10_000)
def hostfiles(r, folder):
    match r.randrange(5):
        case 4:
            (folder / ".jzero_env").write_bytes(garbled(r, SHARED, INSIDE).encode("utf-8", "surrogatepass"))
            env = environment.propagated({}, str(folder), str(folder))
            assert not any("\0" in name + value or "\n" in name for name, value in env.items())
        case 0:
            find_place({name: garbled(r, value, INSIDE) for name, value in r.choice(VARIABLES).items()})
        case 1:
            slurm_hosts(garbled(r, "gpu[08-10,12],login1,rack[1-2]n[1-3]", INSIDE))
        case _:
            file = folder / "hosts"
            file.write_bytes(garbled(r, HOSTS, INSIDE).encode("utf-8", "surrogatepass"))
            slots = hostfile.read_hostfile(file)
            hosts = {host: list(range(n)) for host, n in slots.items()}
            hostfile.select_hosts(hosts, include=garbled(r, "worker-1@worker-2:0,2", INSIDE))
            hostfile.visible_devices({"CUDA_VISIBLE_DEVICES": garbled(r, "0,1,GPU-12ab", INSIDE)})


@functools.cache
def saved(folder):
    """Save two checkpoints; return the state, its shardings and the contents of all files."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {"w": jnp.arange(60.0).reshape(12, 5), "step": jnp.int32(7), "half": jnp.ones(9, jnp.bfloat16)}
    for tag in ("first", "second"):
        checkpoint.save(state, folder, tag=tag).wait()
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return jax.tree.map(np.asarray, state), jax.tree.map(lambda _: device, state), files


@fuzzer(few=60, many=2500)
def checkpoints(r, folder):
    """Also without a tag, by the file `latest`."""
    state, shardings, files = saved(folder)
    path, other = r.sample(list(files), 2) if r.random() < 0.8 else (folder / "latest", folder / "first/notes.json")
    try:
        match r.randrange(8):
            case 0:
                path.unlink()
            case 1:
                path.unlink()
                path.mkdir()
            case 2:
                path.write_bytes(files[other])
            case 3:
                path.unlink()
                path.symlink_to(r.choice(["/nowhere", path.name, other]))
            case _:
                path.write_bytes(cut(r, files[path]))
        read = checkpoint.restore(folder, shardings, tag=r.choice(["first", "second", None]))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, read), state)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(files[path])


ORDER = {"samples": 24, "seed": 7, "drop_last": True}
RECORDS = [
    {"kind": "start", "time": 10.0, "began": 1.0, "new": True, "attempt": "a 0", "devices": 2, "device": "cpu",
     "mesh": {"zero": 2, "data": 1}},
    {"kind": "state", "time": 11.0, "step": 0, "samples": 0, "from": None, "data": [0, 0], "order": ORDER},
    *({"kind": "step", "time": 11.0 + n, "step": n, "samples": 8 * n, "rows": 8, "began": 10.5 + n, "tokens": 64,
       "metrics": {"loss": 3.0 / n, "lr": 0.5}, "data": [[0, 8 * n - 8], [0, 8 * n]], "compile": 0.1, "save": 0.2,
       "compile_before": 0.1, "wait": 0.1, "evaluation": 0.1, "peak": 2**20 * n} for n in (1, 2, 3)),
    {"kind": "evaluation", "time": 15.0, "step": 3, "samples": 24, "began": 14.5, "metrics": {"loss": 1.0}},
    {"kind": "save", "time": 16.0, "tag": "a", "directory": "/runs", "step": 3, "began": 15.0, "stall": 0.1,
     "background": 1.0, "bytes": 10, "error": None},
    {"kind": "notice", "time": 16.5, "step": 3, "what": "spike", "text": "far above"},
    {"kind": "failure", "time": 18.0, "attempt": "a 0", "died": 17.0, "code": 1, "reason": "rank 0 was killed"},
    {"kind": "start", "time": 20.0, "began": 19.0, "new": False, "attempt": "a 1", "devices": 2, "device": "cpu"},
    {"kind": "state", "time": 21.0, "step": 2, "samples": 16, "from": "/runs/a", "data": [0, 16], "order": ORDER},
    {"kind": "step", "time": 23.0, "step": 3, "samples": 24, "rows": 8, "began": 21.0, "metrics": {"loss": "nan"},
     "data": [[0, 16], [0, 24]]},
    {"kind": "end", "time": 24.0, "step": 3, "reason": ""},
]  # fmt: skip
CURVES = [{"step": n, "samples": 8 * n, "Train/Samples/train_loss": 3.0 / n} for n in (1, 2, 3)]


@fuzzer(few=150, many=10_000)
def ledgers(r, folder):
    name, lines = r.choice([(schema.FILE, RECORDS)] * 3 + [(METRICS, CURVES)])
    lines = json.loads(json.dumps(lines))
    for _ in range(r.choice([0, 1, 1, 2])):
        *path, key = r.choice([place for place in places(lines) if len(place) > 1])
        node = lines
        for step in path:
            node = node[step]
        if r.random() < 0.8:
            node[key] = copy.deepcopy(r.choice(HOSTILE))
        elif isinstance(node, dict):
            node[r.choice(["", "a\nb", "\x1b[2J", "/", "x" * 1000, "eval_loss"])] = node.pop(key)
    written = [json.dumps(line, default=repr, skipkeys=True) for line in lines]
    if r.random() < 0.2:
        written.insert(r.randrange(len(written)), r.choice(["[" * 10**5, '{"step":' * 10**4, "9" * 5000, "null", "\0"]))
    text = "\n".join(written) + "\n"
    text = garbled(r, text, '{}[]",:e-.09\0\u2028') if r.random() < 0.3 else text
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    if name == schema.FILE:
        repr(ledger.read(run))
    histories = history.read_all([run])
    styled(*run_plots.contents(histories, {}))
    for step in ledger.read(run).steps if name == schema.FILE else ():
        ledger.read(run).rows(step)


def answer(port, data):
    """Send `data` as soon as somebody listens, and return what comes back in the meantime."""
    with call(port) as connection, contextlib.suppress(OSError):
        connection.settimeout(0.005)
        connection.sendall(data)
        return connection.recv(4096)
    return b""


@fuzzer(few=30, many=1500)
def rendezvous(r, folder):
    """Ranks 1 and 2 meet rank 0, whatever strangers send; a process of another job is refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place, secret, wrong = f"127.0.0.1:{port}", r.choice(["", "s" * 64, "é"]), None
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, place, 0, 3, 20.0, "job", "127.0.0.1", secret)
        rank, proof = r.choice(["1", "2", "0", "-1", "3", "9" * 30, "1e3", ""]), r.choice(["-", "0" * 64])
        lines = [f"jzero {'0' * 32} job {rank} 3\n{proof}\n", "GET / HTTP/1.1\r\n\r\n"]
        for _ in range(r.choice([1, 2, 3])):
            data = garbled(r, r.choice(lines), INSIDE).encode("utf-8", "surrogatepass") * r.choice([1, 1, 1, 3000])
            heard = answer(port, data)
            assert not secret or b"go" not in heard
        if r.random() < 0.5:
            try:
                meet(place, 2, 3, 5.0, "other", "", secret)
                raise AssertionError("met as a process of another job")
            except jzero.ConfigError as error:
                wrong = error
        for one in [first, *(pool.submit(meet, place, rank, 3, 20.0, "job", "", secret) for rank in (1, 2))]:
            one.result(30)
    if wrong:
        raise wrong


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # about regular expressions that it makes
@pytest.mark.parametrize("name", FUZZERS)
def test_few_cases(name, tmp_path):
    fuzz(name, FUZZERS[name][1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_many_cases(name, tmp_path):
    fuzz(name, FUZZERS[name][2], tmp_path)
