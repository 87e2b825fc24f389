"""The benchmarks of mixtures of experts and of LoRA train, in small, by each runner."""

import json
import math

import jax
import numpy as np
import pytest
from helpers.sampling import keep

from experiments.benchmarks import first, gpu, lora, mixtures

ROWS = [(case, runner) for case in mixtures.CASES for runner in ("jzero", "torch")]


@pytest.mark.parametrize(("case", "runner"), keep(ROWS, [("qwen3-moe", "jzero")]))
def test_a_mixture_trains(case, runner, monkeypatch, capsys):
    """The first loss is that of words drawn at random, and the same batch is learned."""
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    for module in (mixtures, first):
        monkeypatch.setattr(module, "steps", lambda run, wait: 1)
    if runner == "torch":
        pytest.importorskip("torch")
    mixtures.main(["--case", case, "--runner", runner, "--tiny"])
    found = json.loads(capsys.readouterr().out)
    start, end = found["losses"]
    assert start == pytest.approx(math.log(128), abs=0.3)
    assert end < start - 0.1
    assert found["step_s_min"] <= found["step_s"] <= found["step_s_max"]


@pytest.mark.parametrize("case", mixtures.CASES)
def test_pytorch_has_the_same_parameters(case):
    torch = pytest.importorskip("torch")
    from experiments.benchmarks.mixtures_torch import Decoder

    shape = mixtures.shape_of(mixtures.parse(["--case", case, "--runner", "torch"]))
    with torch.device("meta"):
        found = sum(x.numel() for x in Decoder(shape, padded=False).parameters())
    assert found == shape.num_parameters


def test_pytorch_moves_rows_to_their_experts_and_back():
    """A loop over the experts has the same output and the same gradient."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks.mixtures_torch import Mixture, swiglu

    torch.manual_seed(0)
    layer = Mixture(mixtures.shape_of(mixtures.parse(["--case", "qwen3-moe", "--runner", "torch", "--tiny"])))
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=0.3)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)

    def loop(x):
        weights, chosen = (x.float() @ layer.router.weight.T).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(8):
            h = swiglu(*(x.float() @ layer.gate_up[expert].T).chunk(2, -1)) @ layer.down[expert].T
            y = y + h * (weights * (chosen == expert)).sum(-1, keepdim=True)
        return y

    dy = torch.randn(2, 16, 64)
    (dx,) = torch.autograd.grad(layer(x), x, dy.to(torch.bfloat16))
    (wanted,) = torch.autograd.grad(loop(x), x, dy)
    for here, there in ((layer(x), loop(x)), (dx, wanted)):
        assert (here - there).norm() < 0.01 * there.norm()


@pytest.mark.parametrize("quantized", keep(["nf4", "int8", "none"], ["none"]))
def test_adapters_train(quantized, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    lora.main(["--preset", "tiny", "--sequence", "32", "--micro-batch", "2", "--quantized", quantized])
    found = json.loads(capsys.readouterr().out)
    losses = list(found["losses"].values())
    assert losses[-1] < losses[0] - 0.1
    assert (
        set(found["params_gib"])
        == {
            "nf4": {"uint8", "int8", "bfloat16", "float32"},
            "int8": {"int8", "bfloat16", "float32"},
            "none": {"bfloat16", "float32"},
        }[quantized]
    )


def test_quantised_matrices_are_normal():
    """They stand for weights of a deviation of 0.02, drawn layer by layer."""
    shapes = {"q": dict.fromkeys(("codes", "scales", "step", "offset", "q_proj"))}
    shapes["q"]["codes"] = jax.ShapeDtypeStruct((2, 64, 96), np.uint8)
    made = lora.quantized_weights(shapes, "nf4")["q"]
    assert made["q_proj"] is None
    nibbles = np.concatenate([made["codes"] & 15, made["codes"] >> 4], axis=1)
    scales = made["scales"] * made["step"][..., None] + made["offset"][..., None]
    from models.quantized import NF4

    matrix = np.array(NF4)[nibbles].reshape(2, 2, 64, 96) * np.array(scales)[:, :, None]
    assert matrix.std() == pytest.approx(0.02, rel=0.03)
    assert abs(matrix.mean()) < 1e-3


@pytest.mark.slow
def test_pytorch_adapters_train(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import lora_torch

    torch.set_num_threads(1)
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    lora_torch.main(["--preset", "tiny", "--sequence", "32", "--remat", "full"])
    losses = list(json.loads(capsys.readouterr().out)["losses"].values())
    assert losses[-1] < losses[0] - 0.1
