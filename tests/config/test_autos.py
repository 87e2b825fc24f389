"""What "auto" becomes without the Hugging Face Trainer, and PyTorch's and apex's automatic casts.

The values are the defaults of transformers' TrainingArguments (training_args.py), put in as its
integrations/deepspeed.py does; the schedule's rates are DeepSpeed's formula (runtime/lr_schedules.py) written out.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.refusals import refuses

import jzero
from jzero.config import Config
from jzero.optimizers import parameters
from jzero.planner import gpu_devices
from jzero.precision import settle_precision
from jzero.run.restore import other_precision

A = "auto"
ADAM = {"type": "AdamW", "params": {"lr": A, "betas": A, "eps": A, "weight_decay": A}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": A, "warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A},
}
AUTOS = {
    "train_batch_size": A, "train_micro_batch_size_per_gpu": A, "gradient_accumulation_steps": A,
    "gradient_clipping": A, "optimizer": ADAM, "scheduler": DECAY, "bf16": {"enabled": A}, "fp16": {"enabled": A},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": A},
}  # fmt: skip
CONSTANT = AUTOS | {"scheduler": None}
DATA = np.ones((150, 8), np.float32)
MODEL = jzero.from_flax(lambda rngs: nnx.Linear(8, 1, rngs=rngs), lambda net, batch: net(batch).mean())


def make(config, **more):
    return jzero.make_train_step(MODEL, config, **more)


def start(config, **more):
    return jzero.initialize(model=MODEL, config=config, **more)


def test_the_optimizers_parameters():
    expected = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert parameters(Config.load(AUTOS).optimizer).items() >= expected.items()
    assert parameters(SimpleNamespace(type="SGD", params={"lr": A, "betas": A, "momentum": A}))["lr"] == 5e-5


def decay(step, total, peak=5e-5, n=2):
    """WarmupDecayLR: two steps at 0, then the logarithmic warm-up over max(2, 0) steps, then a line to 0 at `total`."""
    k = step - 1
    if k < 0:
        return 0.0
    return peak * (np.log(k + 1) / np.log(n) if k < n else max(0.0, (total - k) / max(1, total - n)))


@pytest.mark.parametrize(("drop", "total"), [(False, 9), (True, 6)])
def test_the_total_of_a_schedule(drop, total, capsys):
    """150 samples are three global batches of 64, or two whole ones; the Trainer's default is three epochs."""
    *_, lr = start({**AUTOS, "dataloader_drop_last": drop}, training_data=DATA)
    assert [float(lr(n)) for n in range(12)] == pytest.approx([decay(n, total) for n in range(12)], rel=1e-5, abs=1e-12)
    report = " ".join(capsys.readouterr().out.split())
    expected = (
        "3 epochs, the Trainer's default, of",
        f"WarmupDecayLR: total_num_steps {total}: ", f"scheduler.params.total_num_steps = {total}, ",
        "scheduler.params.warmup_num_steps = 0", "scheduler.params.warmup_max_lr = 5e-05",
        "optimizer.params.lr = 5e-05", "train_micro_batch_size_per_gpu = 8",
        'zero_optimization.reduce_bucket_size = "auto": XLA\'s collective combiner',
    )  # fmt: skip
    assert [words for words in expected if words not in report] == []


def scheduled(**params):
    return AUTOS | {"scheduler": {"type": "WarmupDecayLR", "params": DECAY["params"] | params}}


def rate(config, step, total):
    return float(make(config, total_num_steps=total).setup.optimizer.schedule.lr(step))


def test_a_total_that_nobody_knows():
    for call in (make, start, lambda config: start(config, training_data=lambda: iter([]))):
        text = refuses(lambda call=call: call(AUTOS))
        assert text.startswith('scheduler.params.total_num_steps = "auto": ')
        assert "pass total_num_steps=" in text
    refuses(lambda: make(AUTOS, total_num_steps=0), "total_num_steps = 0: must be")
    assert rate(AUTOS, 30, 40) == pytest.approx(decay(30, 40), rel=1e-5)
    long = scheduled(warmup_num_steps=50)
    refuses(lambda: rate(long, 0, 40), "warmup_num_steps = 50 and total_num_steps = 40: the warm-up must not be")
    jzero.make_eval_step(MODEL, lambda net, x: net(x), long)  # needs no schedule


def test_another_total_than_the_configs():
    config = scheduled(total_num_steps=9)
    for call in (make, start):
        text = refuses(lambda call=call: call(config, total_num_steps=40))
        assert text.startswith("total_num_steps = 40, and scheduler.params.total_num_steps = 9: ")
    assert rate(config, 5, 9) == pytest.approx(decay(5, 9), rel=1e-5)
    jzero.make_eval_step(MODEL, lambda net, x: net(x), config)


@pytest.mark.parametrize(
    ("config", "arguments", "taker"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, "scheduler.type 'WarmupLR'"),
        ({}, {}, "a constant learning rate"),
        ({"scheduler": DECAY}, {"lr_scheduler": lambda count: 0.1}, "lr_scheduler"),
        ({}, {"optimizer": optax.sgd(0.1)}, "the optimizer passed in"),
    ],
)
def test_a_total_that_no_schedule_takes(config, arguments, taker):
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    for call in (start,) if "lr_scheduler" in arguments else (start, make):
        text = refuses(lambda call=call: call(config, **arguments, total_num_steps=40))
        assert text == f"total_num_steps = 40 has no effect: {taker} takes none; leave it out"
    if arguments == config.get("scheduler", {}):
        start(config, training_data=DATA)  # counts the steps of training_data itself


CPU = jax.devices()[0]
H100 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
V100 = SimpleNamespace(platform="gpu", compute_capability="7.0", device_kind="Tesla V100")
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="MI300X")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5")
BOTH, BF16, FP16 = {"bf16", "fp16"}, {"bf16"}, {"fp16"}


@pytest.mark.parametrize(
    ("left_open", "dtype", "device", "chosen"),
    [
        (BOTH, jnp.float32, CPU, "fp32"), (BOTH, jnp.bfloat16, CPU, "bf16"), (BOTH, jnp.float16, CPU, "fp16"),
        (BF16, jnp.float16, CPU, "fp32"), (FP16, jnp.bfloat16, H100, "fp32"),
        (BOTH, jnp.float32, H100, "bf16"), (BF16, jnp.float32, H100, "bf16"), (FP16, jnp.float32, H100, "fp16"),
        (BOTH, jnp.float32, V100, "fp16"), (BF16, jnp.float32, V100, "fp32"), (FP16, jnp.float32, V100, "fp16"),
        (BOTH, jnp.float32, AMD, "bf16"), (BOTH, jnp.float32, TPU, "bf16"), (BOTH, jnp.float16, H100, "fp16"),
    ],
)  # fmt: skip
def test_the_precision_that_a_config_leaves_open(left_open, dtype, device, chosen):
    params = {"w": jnp.zeros((4, 4), dtype), "scale": jnp.zeros(4, jnp.float32), "ids": jnp.zeros(99, jnp.int32)}
    config, why = settle_precision(Config.load({name: {"enabled": A} for name in left_open}), params, device)
    assert config.precision == chosen
    assert f'"auto": {chosen}, since the parameters are {jnp.dtype(dtype).name}' in why
    assert (device.device_kind in why) == (dtype == jnp.float32)
    assert 'write "enabled": true or false' in why


def test_a_resume_at_another_precision_says_why():
    step = make(CONSTANT)
    text = other_precision({"precision": "bf16"}, step)
    assert text.startswith("the checkpoint's run computed in bf16, and this one computes in fp32 (bf16.enabled ")
    assert 'write "enabled": true or false to decide' in text
    assert other_precision({"precision": "fp32"}, step) == other_precision({}, step) == ""


def test_the_run_and_its_report_follow_the_gpu():
    """One that is not there computes in bfloat16."""
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 2))
    step = make(CONSTANT, mesh=mesh)
    assert (step.config.precision, step.precision.compute, step.precision.master) == ("bf16", "bfloat16", "float32")
    assert "bf16.enabled = true" in " ".join(jzero.report(step).split())


def test_a_precision_that_a_config_gives_stays():
    """PyTorch's and apex's automatic casts give one; what each becomes is in loads.jsonl."""
    for given in ({}, {"fp16": {"loss_scale": A}}, {"torch_autocast": {"enabled": True}}, {"amp": {"enabled": A}}):
        assert settle_precision(config := Config.load(given), {"w": jnp.zeros(3)}, H100) == (config, "")
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        config = Config.load({name: {"enabled": True}, other: {"enabled": A}})
        assert settle_precision(config, {"w": jnp.zeros(3)}, H100) == (config, "")
        assert config.precision == name


def test_amps_loss_scale_is_apexs():
    """apex/amp/scaler.py: from 2**16, halved at the first overflow, doubled after 2,000 clean steps."""
    dynamic = Config.load({"amp": {"enabled": True}}).fp16
    assert (dynamic.loss_scale, dynamic.initial_scale_power) == (0, 16)
    assert (dynamic.loss_scale_window, dynamic.hysteresis) == (2000, 1)
    assert Config.load({"amp": {"enabled": True, "loss_scale": "128.0"}}).fp16.loss_scale == 128
    own = Config.load({"amp": {"enabled": True}, "fp16": {"hysteresis": 3}}).fp16
    assert (own.enabled, own.hysteresis) == (True, 3)
