"""The search, against trying everything on a made-up machine; and the candidates, against counts by hand."""

import itertools
import json
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.refusals import refuses
from helpers.sampling import keep

from jzero import cli
from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO
from jzero.planner import candidates as keys
from jzero.planner import search as search_module
from jzero.planner.candidates import Bounds, SearchSpace, Task, merged
from jzero.planner.estimates import Estimate
from jzero.planner.gpus import GPUS, Cluster
from jzero.planner.rates import Rates
from jzero.planner.search import search_configs, smallest
from models.llama import preset

RAW = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True}}
ONE_HOST = SearchSpace(RAW, Cluster("h200", 1, 2), 4)  # of `task()`


def candidates(gpus=4, each=4, layers=4, **raw):
    found = list(SearchSpace(RAW | raw, Cluster("h200", gpus // each, each), layers).candidates())
    assert found
    return found


def task(nodes=1, each=2, raw=RAW, layers=4):
    changes = f"num_layers={layers}", "d_model=384", "d_ff=768"
    return Task(raw, "llama:tiny", 128, changes, Cluster("h200", nodes, each), Rates.of("h200"))


def test_candidates_by_hand():
    """4 GPUs, 4 layers, 16 rows; with a stage, a pipeline and a micro-batch that stay; with two hosts.

    pipe 1, zero 4: 4 rows each: micro 1, 2, 4; 4 stages x 3 policies x 3 = 36. pipe 2, zero 2: 8 rows each: micro
    1, 2, 4, 8; schedules 1f1b, interleaved 2, zero_bubble 1 and 2: 4 stages x 4 x 3 x 4 = 192. pipe 4: 16 rows,
    5 micro-batches, one chunk: 1f1b and zero_bubble: 1 stage x 2 x 3 x 5 = 30.
    """
    assert len(candidates()) == 36 + 192 + 30
    found = candidates(zero_optimization={"stage": 2}, mesh={"pipe": 2}, train_micro_batch_size_per_gpu="auto")
    assert {candidate[MICRO] * candidate[ACCUM] for candidate in found} == {8}
    assert not any(candidate.keys() & {keys.STAGE, keys.MESH_PIPE} for candidate in found)
    assert len(found) == 4 * 3 * 4
    # ZeRO stays within a host.
    assert {(c[keys.MESH_DATA], c[keys.MESH_ZERO]) for c in candidates(gpus=8, layers=0)} == {(1, 8), (2, 4)}


def test_a_given_schedule_is_the_one():
    assert not any(keys.SCHEDULE in c for c in candidates(mesh={"pipe": 2}, pipeline={"schedule": "gpipe"}))


@pytest.mark.parametrize(
    ("given", "zero", "replicas"),
    [
        ({"mesh": {"tensor": 2}}, 2, 2),
        ({"mesh": {"expert": 2}}, 2, 4),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, 1, 4),
        ({"sequence_parallel_size": 4}, 1, 1),
    ],
)
def test_the_degrees_of_a_group_are_kept(given, zero, replicas):
    """What is left is ZeRO's. The devices along `expert` count as replicas, and ZeRO partitions over both axes."""
    found = candidates(**given)
    assert {candidate.get(keys.MESH_PIPE, 1) for candidate in found} == {1}
    assert {candidate[keys.MESH_ZERO] for candidate in found} == {zero}
    assert {candidate[MICRO] * candidate[ACCUM] * replicas for candidate in found} == {16}
    assert {candidate[keys.STAGE] for candidate in found} == {0, 1, 2, 3}
    for candidate in found[:: len(found) // 5]:
        made = Config.load(merged(RAW | given, candidate))
        assert made.mesh_degrees(4)["zero"] == zero
        assert made.batch(replicas).train == 16


def test_precision_of_a_gpu():
    for gpu, given, expected in (("h100", "auto", "bf16"), ("h100", True, None), ("t4", "auto", "fp16")):
        space = SearchSpace({"train_batch_size": 16, "bf16": {"enabled": given}}, Cluster(gpu, 1, 1), 0)
        assert space.precision() == ({f"{expected}.enabled": True} if expected else {})


def test_a_given_pipeline_keeps_its_small_micro_batches():
    """Their bubble is the smallest: a larger micro-batch that fits says nothing about them."""
    raw = RAW | {"mesh": {"pipe": 2}}
    there = list(SearchSpace(raw, Cluster("h200", 1, 2), 4).candidates())
    known = search_module._OpenCandidates(Bounds(task(raw=raw)), there, GPUS["h200"].memory, False)
    before = len(known.open)
    known.learn(Estimate(next(c for c in there if c[MICRO] == 8), 1, GPUS["h200"].memory, 0, 1.0, 16.0))
    assert len(known.open) == before


@needs_cuda_compiler
def test_the_least_time_of_a_candidate():
    """The products at the full rate, without attention; two stages with two micro-batches idle a third of the time."""
    raw = RAW | {"mesh": {"pipe": 2}}
    candidate = {keys.POLICY: "none", MICRO: 8, ACCUM: 2, keys.SCHEDULE: "1f1b"}
    of_attention = 12 * 384 * 2 * 128 / 2  # width, layers, the keys that a token sees
    shape = preset("tiny", num_layers=2, d_model=384, d_ff=768)
    flops = (shape.flops_per_token(128) - of_attention) * 128 * 16
    expected = flops / 2 / dict(Rates.of("h200").products)["f16"] * 3 / 2
    assert Bounds(task(raw=raw, layers=2)).seconds(candidate) == pytest.approx(expected, rel=0.005)


@pytest.fixture
def machine(monkeypatch):
    """`machine(bounds_of, activations)` plans on a machine that obeys a formula; (its estimate, what it compiled)."""

    def make(bounds_of, activations, scale=1.0):
        compiled = []

        def estimate(task, candidate):
            bounds = bounds_of(task)
            compiled.append(json.dumps(candidate))
            micro, scanned = candidate[MICRO], candidate.get(keys.UNROLL) is False
            beyond = activations and activations * micro * bounds.pipeline(candidate)[0] * (0.5 if scanned else 1)
            beyond *= {"none": 1.0, "matmuls": 0.6, "full": 0.1}[candidate[keys.POLICY]]
            seconds = 1.05 + 0.2 / micro + (0.1 if candidate.get(keys.STAGE, 0) == 3 else 0.0)
            if activations:  # else the time does not matter, and its bound needs traces
                seconds *= bounds.seconds(candidate)
            seconds *= 1.1 if candidate.get(keys.MESH_PIPE, 1) > 1 else 1.0
            seconds *= 1.08 if scanned else 1
            seconds *= 3 if candidate.get(keys.OFFLOAD_OPTIMIZER) == "cpu" else 1
            peak = int(scale * (bounds.memory(candidate) + beyond))
            return Estimate(candidate, peak, GPUS["h200"].memory, 0, seconds, 16 / seconds, 2048 / seconds, 0.5)

        def submit(_, task, candidate):
            future = Future()
            future.set_result(estimate(task, candidate))
            return future

        monkeypatch.setattr(search_module, "Pool", lambda: nullcontext(SimpleNamespace(size=2, submit=submit)))
        return estimate, compiled

    return make


@pytest.mark.slow
@needs_cuda_compiler
@pytest.mark.parametrize("activations", keep([12 * 2**30, 60 * 2**30, 2**42], [12 * 2**30]))
def test_finds_what_trying_everything_finds(activations, machine):
    """From much memory to so little that nothing fits, not even with the state on the host."""
    shared = Bounds(task())
    estimate, compiled = machine(lambda _: shared, activations)
    there = itertools.product(ONE_HOST.candidates(), ({}, {keys.UNROLL: False}))
    everything = [estimate(task(), candidate | unroll) for candidate, unroll in there]
    fitting = [o for o in everything if o.peak_bytes <= GPUS["h200"].usable(2).most]
    compiled.clear()
    if not fitting:
        refuses(lambda: search_configs(task()).best, "the smallest needs")
        return
    found = search_configs(task())
    assert found.best.step_s == pytest.approx(min(o.step_s for o in fitting), rel=0.01)
    assert len(compiled) == len(set(compiled)) < len(everything) / 3
    assert sum(found.dropped.values()) > 0
    frontier = search_configs(task(), every=True).frontier
    assert len(frontier) > 1
    for one in frontier:
        assert not any(o.step_s < 0.999 * one.step_s and o.peak_bytes < 0.999 * one.peak_bytes for o in everything)


@needs_cuda_compiler
def test_no_time(machine):
    machine(lambda _: None, 0)
    found = search_configs(task(), minutes=0)
    assert found.dropped == {search_module.LATE: len(list(ONE_HOST.candidates()))}
    refuses(lambda: found.best, "no time left")
    refuses(lambda: list(SearchSpace({}, Cluster("h100", 1, 1), 0).candidates()), "train_batch_size = None")


@needs_cuda_compiler
@pytest.mark.parametrize(("nodes", "gpus"), keep([(1, 2), (3, 4)], [(1, 2)]))
def test_the_smallest_cluster(nodes, gpus, machine):
    """The made-up machine needs a multiple of the formula's bytes, such that this cluster is just large enough."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    raw = RAW | {"train_batch_size": 48, "zero_optimization": zero, "mesh": {"pipe": 1}}
    known = {}

    def of(there):
        return known.setdefault(there.cluster, Bounds(there))

    there, cluster = of(task(nodes, gpus, raw, 1)), Cluster("h200", nodes, gpus)
    smallest_ones = (candidate for candidate in SearchSpace(raw, cluster, 1).candidates() if candidate[MICRO] == 1)
    least = min(map(there.memory, smallest_ones))
    machine(of, 0, 0.999 * GPUS["h200"].usable(nodes * gpus).most / least)
    found, estimate = smallest(task(each=4, raw=raw, layers=1))
    assert found.cluster == cluster
    assert estimate.fits


@pytest.mark.slow
@pytest.mark.gpu_compile
@needs_cuda_compiler
def test_the_command(tmp_path, capsys, monkeypatch):
    """Two real processes; the config found plans to the same figures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw = RAW | {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "mesh": {"pipe": 1, "data": 1, "zero": 2}}
    raw["activation_checkpointing"] = {"policy": "none"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = ["--model", "llama:tiny", "--seq", "128", "--gpu", "h200", "--gpus_per_node", "2", "--json"]
    options += ["--adapters", "lora", "--rank", "8"]
    best = str(tmp_path / "best.json")
    assert cli.main(["plan", str(tmp_path / "config.json"), *options, "--search", "--out", best]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {key: record["config"][key] for key in raw} == raw
    assert record["config"]["trainable_parameters"] == ["lora_"]
    first = record["estimates"][0]
    assert first["candidate"].keys() == {MICRO, ACCUM}
    assert cli.main(["plan", best, *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"]["peak_bytes"] == first["peak_bytes"]
    assert planned["time"]["step_s"] == pytest.approx(first["step_s"])
