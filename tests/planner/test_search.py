"""The search, against trying everything on a made-up machine; and the candidates, against counts by hand."""

import itertools
import json
from concurrent.futures import Future

import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep

from jzero import cli
from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO
from jzero.errors import ConfigError
from jzero.planner import estimates
from jzero.planner import search as search_module
from jzero.planner.candidates import (
    MESH_DATA,
    MESH_PIPE,
    MESH_ZERO,
    OFFLOAD_OPTIMIZER,
    POLICY,
    SCHEDULE,
    STAGE,
    UNROLL,
    Bounds,
    SearchSpace,
    Task,
    is_open,
    merged,
    value_at,
)
from jzero.planner.estimates import Estimate
from jzero.planner.gpus import GPUS, Cluster
from jzero.planner.plan import lower_step
from jzero.planner.rates import Rates
from jzero.planner.search import search_configs, smallest

RAW = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True}}
CHANGES = ("num_layers=4", "d_model=384", "d_ff=768")


def space(gpus=4, each=4, layers=4, **raw):
    return SearchSpace(RAW | raw, Cluster("h200", gpus // each, each), layers)


def task(nodes=1, each=2, raw=RAW):
    return Task(raw, "llama:tiny", 128, CHANGES, Cluster("h200", nodes, each), Rates.of("h200"))


class TestChoices:
    def test_count_by_hand(self):
        """4 GPUs, 4 layers, 16 rows.

        pipe 1, zero 4: 4 rows each: micro 1, 2, 4; 4 stages x 3 policies x 3 = 36. pipe 2, zero 2: 8 rows each: micro
        1, 2, 4, 8; schedules 1f1b, interleaved 2, zero_bubble 1 and 2: 4 stages x 4 x 3 x 4 = 192. pipe 4: 16 rows,
        5 micro-batches, one chunk: 1f1b and zero_bubble: 1 stage x 2 x 3 x 5 = 30.
        """
        assert len(list(space().candidates())) == 36 + 192 + 30

    def test_what_the_config_has_is_kept(self):
        given = {"zero_optimization": {"stage": 2}, "mesh": {"pipe": 2}, "train_micro_batch_size_per_gpu": "auto"}
        found = list(space(**given).candidates())
        assert {candidate[MICRO] * candidate[ACCUM] for candidate in found} == {8}
        assert not any(candidate.keys() & {STAGE, MESH_PIPE} for candidate in found)
        assert len(found) == 4 * 3 * 4

    def test_zero_in_a_host_across_hosts(self):
        found = list(space(gpus=8, each=4, layers=0).candidates())
        assert {(c[MESH_DATA], c[MESH_ZERO]) for c in found} == {(1, 8), (2, 4)}

    @pytest.mark.parametrize("given", [{"tensor_parallel": {"autotp_size": 2}}, {"mesh": {"tensor": 2}}])
    def test_the_degree_of_tensor_is_kept(self, given):
        """What is left of the devices is ZeRO's."""
        found = {
            (candidate.get(MESH_PIPE, 1), candidate.get(MESH_ZERO, -1)) for candidate in space(**given).candidates()
        }
        assert found == {(1, 2)}
        raw = merged(RAW | given, next(space(**given).candidates()))
        degrees = Config.load(raw).mesh_degrees(4)
        assert {axis: n for axis, n in degrees.items() if n > 1} == {"zero": 2, "tensor": 2}

    @pytest.mark.parametrize(
        ("given", "zero", "replicas"),
        [
            ({"mesh": {"expert": 2}}, 2, 4),
            ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, 1, 4),
            ({"mesh": {"context": 2}}, 2, 2),
            ({"sequence_parallel_size": 4}, 1, 1),
        ],
    )
    def test_the_degrees_of_expert_and_context_are_kept(self, given, zero, replicas):
        """The devices along `expert` count as replicas, and ZeRO partitions over both axes."""
        found = list(space(**given).candidates())
        assert {candidate[MESH_ZERO] for candidate in found} == {zero}
        assert {candidate[MICRO] * candidate[ACCUM] * replicas for candidate in found} == {16}
        assert {candidate[STAGE] for candidate in found} == {0, 1, 2, 3}
        for candidate in found[:: len(found) // 5]:
            made = Config.load(merged(RAW | given, candidate))
            assert made.mesh_degrees(4)["zero"] == zero
            assert made.batch(replicas).train == 16

    def test_precision_of_a_gpu(self):
        raw = {"train_batch_size": 16}
        assert SearchSpace(raw, Cluster("h100", 1, 1), 0).precision() == {"bf16.enabled": True}
        assert SearchSpace(raw, Cluster("t4", 1, 1), 0).precision() == {"fp16.enabled": True}
        assert SearchSpace(RAW, Cluster("h100", 1, 1), 0).precision() == {}

    def test_no_global_batch(self):
        with pytest.raises(ConfigError, match="train_batch_size = None"):
            list(SearchSpace({}, Cluster("h100", 1, 1), 0).candidates())

    def test_open_keys(self):
        raw = {"zero_optimization": {"stage": "auto"}, "stack": {"unroll": False}}
        assert is_open(raw, STAGE)
        assert not is_open(raw, UNROLL)
        assert value_at(merged(raw, {STAGE: 2}), STAGE) == 2


MEMORY = GPUS["h200"].memory


def machine(bounds_of, activations, scale=1.0):
    """Make a planner of a machine that obeys a formula; returns what it compiled too."""
    compiled = []

    def estimate(task, candidate):
        bounds = bounds_of(task)
        compiled.append(json.dumps(candidate))
        micro, policy = candidate[MICRO], {"none": 1.0, "matmuls": 0.6, "full": 0.1}[candidate[POLICY]]
        beyond = (
            activations
            * policy
            * micro
            * bounds.pipeline(candidate)[0]
            * (0.5 if candidate.get(UNROLL) is False else 1)
        )
        waste = 1.05 + 0.2 / micro + (0.1 if candidate.get(STAGE, 0) == 3 else 0.0)
        seconds = bounds.seconds(candidate) * waste * (1.1 if candidate.get(MESH_PIPE, 1) > 1 else 1.0)
        seconds *= 1.08 if candidate.get(UNROLL) is False else 1
        seconds *= 3 if candidate.get(OFFLOAD_OPTIMIZER) == "cpu" else 1
        peak = int(scale * (bounds.memory(candidate) + beyond))
        return Estimate(candidate, peak, MEMORY, 0, seconds, 16 / seconds, 2048 / seconds, 0.5)

    class Pool:
        size = 2

        def submit(self, _, task, candidate):
            future = Future()
            future.set_result(estimate(task, candidate))
            return future

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    return Pool, estimate, compiled


def test_a_given_pipeline_keeps_its_small_micro_batches():
    """Their bubble is the smallest: a larger micro-batch that fits says nothing about them."""
    raw = RAW | {"mesh": {"pipe": 2}}
    bounds = Bounds(task(raw=raw))
    candidates = search_module._OpenCandidates(
        bounds, list(SearchSpace(raw, Cluster("h200", 1, 2), 4).candidates()), MEMORY, False
    )
    before = len(candidates.open)
    candidates.learn(Estimate(next(c for c in candidates.open if c[MICRO] == 8), 1, MEMORY, 0, 1.0, 16.0))
    assert len(candidates.open) == before


def test_a_given_schedule_is_the_one():
    found = list(space(mesh={"pipe": 2}, pipeline={"schedule": "gpipe"}).candidates())
    assert found
    assert not any(SCHEDULE in candidate for candidate in found)


def test_auto_precision_is_open():
    raw = {"train_batch_size": 16, "bf16": {"enabled": "auto"}}
    assert SearchSpace(raw, Cluster("h100", 1, 1), 0).precision() == {"bf16.enabled": True}
    assert SearchSpace(raw | {"bf16": {"enabled": False}}, Cluster("h100", 1, 1), 0).precision() == {}


@pytest.mark.slow
@needs_cuda_compiler
def test_what_decides_the_program_is_in_the_key(monkeypatch):
    """XLA's options and its memory limit are not in the lowered text."""
    model, shapes = task().named

    def key(**config):
        prepared = lower_step(
            model, RAW | {"train_micro_batch_size_per_gpu": 8} | config, shapes, Cluster("h200", 1, 2)
        )
        return estimates._cached(prepared, Rates.of("h200"))

    plain = key()
    assert key() == plain
    assert key(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": False}) != plain
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert key() != plain


@needs_cuda_compiler
class TestSearch:
    @pytest.mark.slow
    @pytest.mark.parametrize("activations", keep([12 * 2**30, 60 * 2**30, 2**42], [12 * 2**30]))
    def test_finds_what_trying_everything_finds(self, activations, monkeypatch):
        """From much memory to so little that nothing fits, not even with the state on the host."""
        shared = Bounds(task())
        pool, estimate, compiled = machine(lambda _: shared, activations)
        monkeypatch.setattr(search_module, "Pool", pool)
        there = SearchSpace(RAW, Cluster("h200", 1, 2), 4)
        everything = []
        for candidate, unroll in itertools.product(there.candidates(), ({}, {UNROLL: False})):
            everything.append(estimate(task(), candidate | unroll))
        fitting = [o for o in everything if o.peak_bytes <= GPUS["h200"].usable(2).most]
        compiled.clear()
        if not fitting:
            with pytest.raises(ConfigError, match="the smallest needs"):
                search_configs(task()).best  # noqa: B018
            return
        found = search_configs(task())
        assert found.best.step_s == pytest.approx(min(o.step_s for o in fitting), rel=0.01)
        assert len(compiled) == len(set(compiled)) < len(everything) / 3
        assert sum(found.dropped.values()) > 0

    @pytest.mark.slow
    def test_one_gpu_with_its_state_on_the_host(self, monkeypatch):
        """Where masters and moments do not fit; every stage is the same on one GPU, but offload needs the first."""
        shared = Bounds(task(each=1))
        there = list(SearchSpace(RAW, Cluster("h200", 1, 1), 4).candidates())
        assert {candidate[STAGE] for candidate in there} == {0}
        least = min(map(shared.memory, there))
        pool, *_ = machine(lambda _: shared, 0, 1.2 * GPUS["h200"].usable(1).most / least)
        monkeypatch.setattr(search_module, "Pool", pool)
        best = search_configs(task(each=1)).best
        assert best.candidate[OFFLOAD_OPTIMIZER] == "cpu"
        assert best.candidate[STAGE] == 1

    @pytest.mark.slow
    def test_the_frontier_is_not_beaten(self, monkeypatch):
        shared = Bounds(task())
        pool, estimate, _ = machine(lambda _: shared, 12 * 2**30)
        monkeypatch.setattr(search_module, "Pool", pool)
        everything = [
            estimate(task(), candidate) for candidate in SearchSpace(RAW, Cluster("h200", 1, 2), 4).candidates()
        ]
        frontier = search_configs(task(), every=True).frontier
        assert len(frontier) > 1
        for one in frontier:
            assert not any(o.step_s < 0.999 * one.step_s and o.peak_bytes < 0.999 * one.peak_bytes for o in everything)

    def test_no_time(self, monkeypatch):
        pool, *_ = machine(lambda _: None, 0)
        monkeypatch.setattr(search_module, "Pool", pool)
        found = search_configs(task(), minutes=0)
        assert found.dropped == {search_module.LATE: len(list(SearchSpace(RAW, Cluster("h200", 1, 2), 4).candidates()))}
        with pytest.raises(ConfigError, match="no time left"):
            found.best  # noqa: B018

    @pytest.mark.parametrize(("nodes", "gpus"), keep([(1, 2), (3, 4)], [(1, 2)]))
    def test_the_smallest_cluster(self, nodes, gpus, monkeypatch):
        """The made-up machine needs a multiple of the formula's bytes, such that this cluster is just large enough."""
        raw = RAW | {
            "train_batch_size": 48,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "mesh": {"pipe": 1},
        }
        known = {}

        def of(there):
            return known.setdefault(there.cluster, Bounds(there))

        there = SearchSpace(raw, Cluster("h200", nodes, gpus), 4)
        least = min(
            of(task(nodes, gpus, raw)).memory(candidate) for candidate in there.candidates() if candidate[MICRO] == 1
        )
        scale = 0.999 * GPUS["h200"].usable(nodes * gpus).most / least
        pool, *_ = machine(of, 0, scale)
        monkeypatch.setattr(search_module, "Pool", pool)
        found, estimate = smallest(task(each=4, raw=raw))
        assert found.cluster == Cluster("h200", nodes, gpus)
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
    options = ["--model", "llama:tiny", "--seq", "128", "--gpu", "h200", "--gpus_per_node", "2"]
    best = tmp_path / "best.json"
    found = cli.main(["plan", str(tmp_path / "config.json"), *options, "--search", "--out", str(best), "--json"])
    assert found == 0
    record = json.loads(capsys.readouterr().out)
    assert {key: record["config"][key] for key in raw} == raw
    first = record["estimates"][0]
    assert first["candidate"].keys() == {MICRO, ACCUM}
    assert cli.main(["plan", str(best), *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"]["peak_bytes"] == first["peak_bytes"]
    assert planned["time"]["step_s"] == pytest.approx(first["step_s"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--fit", "--search"], "--fit cannot be combined with --search"),
        (["--search", "--html", "x.html"], "without --html, --formula, --tokens and --price"),
        (["--search", "--minutes", "0"], "--minutes 0: must be positive"),
        (["--frontier", "x.txt"], "must end in .svg"),
        (["--search", "--out", "nowhere/x.json"], "no such directory"),
        (["--fit", "--nodes", "2"], "--fit cannot be combined with --minutes (it compiles few)"),
        (["--minutes", "2"], "--minutes, --out: of a search"),
    ],
)
@needs_cuda_compiler
def test_options_that_do_not_go_together(options, problem, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert cli.main(["plan", str(tmp_path / "config.json"), "--model", "llama:tiny", *options]) == 2
    assert problem in capsys.readouterr().err
