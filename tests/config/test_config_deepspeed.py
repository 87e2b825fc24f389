"""What DeepSpeed's JSON files have besides settings: other names, keys that do nothing, remarks, numbers in quotes.

Config files of many projects, if they are at hand, load, or are refused by one line for each cause they have. Their
directory is `JZERO_DS_CONFIGS`, else `shared/ds_configs` beside the repository.

DeepSpeed's names are those of its source: runtime/zero/config.py (`alias`), runtime/config_utils.py (pydantic's lax
mode) and runtime/config.py (`param_dict.get`, which ignores whatever it does not ask for).
"""

import math
import os
import re
from pathlib import Path

import pytest
from helpers.configs import nest, problem, problems

from jzero.config import Config, aliases, keys, screen
from jzero.errors import ConfigError

BOTH_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip


@pytest.mark.parametrize("name", BOTH_NAMES)
def test_zero_keys_have_a_name_without_stage3(name):
    values = {"model_persistence_threshold": 2**63 - 1, "param_persistence_threshold": 7}
    value = values.get(name, name.endswith(("save", "params", "sequential")) or 5e7)
    short = Config.load({"zero_optimization": {name: value}})
    long = Config.load({"zero_optimization": {f"stage3_{name}": value}})
    assert (short, short.replaced) == (long, long.replaced)
    assert (short.replaced != ()) == (name not in values)
    both = problem({"zero_optimization": {name: value, f"stage3_{name}": value}})
    assert both.startswith(f"zero_optimization.{name} = ")
    assert f"is another name of zero_optimization.stage3_{name}, also given" in both


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.sub_group_size", 0), ("zero_optimization.reduce_bucket_size", 0.9 * 2049**2),
        ("zero_optimization.stage3_prefetch_bucket_size", "5e8"), ("zero_optimization.overlap_comm", "True"),
        ("zero_optimization.contiguous_gradients", 1), ("activation_checkpointing.number_checkpoints", False),
        ("allgather_size", 5e8), ("pipeline.partition_method", "type:transformer"),
    ],
)  # fmt: skip
def test_values_of_replaced_keys_that_deepspeed_takes(path, value):
    assert [entry.key for entry in Config.load(nest(path, value)).replaced] == [path]


def test_numbers_and_flags_in_quotes():
    """Only where DeepSpeed takes them too: its other keys fail in the arithmetic."""
    config = Config.load({"zero_optimization": {"stage": "3"}, "fp16": {"enabled": "true", "loss_scale_window": "1e2"}})
    assert (config.zero_optimization.stage, config.fp16.loss_scale_window, config.precision) == (3, 100, "fp16")
    for given in ({"bf16": {"enabled": 1}}, {"bf16": {"enabled": "1"}}, {"bfloat16": {"enabled": "true"}}):
        assert Config.load(given).precision == "bf16"
    assert Config.load({"bfloat16": {"enabled": "auto"}}).autos == ("bf16.enabled",)
    assert problem({"bf16": {"enabled": "2"}}) == problem({"bf16": {"enabled": 2}})
    assert "bf16.enabled = 2: must be true or false" in problem({"bf16": {"enabled": 2}})


def test_no_progress_line(tmp_path):
    """accelerate writes Infinity."""
    (tmp_path / "ds.json").write_text('{"steps_per_print": Infinity}')
    for never in (tmp_path / "ds.json", *({"steps_per_print": x} for x in (math.inf, "inf", "Infinity", None))):
        assert Config.load(never).steps_per_print is None


def test_every_ignored_key_loads_and_is_reported():
    types = {"optimizer": "Adam", "scheduler": "WarmupLR"}
    for path, row in keys.KEYS.items():
        if row.fate == "ignored":
            data, section = nest(path, 3), path.split(".")[0]
            if section in types:
                data[section]["type"] = types[section]
            config = Config.load(data)
            assert config.ignored == ((path, 3, row.text),)
            assert config.replaced == ()


def test_strict_false_makes_warnings_of_unknown_keys():
    given = {"train_batch_sise": 1, "fp16": {"enabld": True}, "wandb": {"projet": "p"}, "made_up": {"a": 1}}
    found = problems(given)
    config = Config.load({**given, "strict": False})
    assert sorted(f"{entry.key}" for entry in config.ignored) == sorted(line.split(" = ")[0] for line in found)
    why = {entry.key: entry.why for entry in config.ignored}
    assert all(text.startswith("unknown key; ") for text in why.values())
    assert why["fp16.enabld"].endswith('did you mean "enabled"?')
    assert (config.strict, Config().strict) == (False, True)
    assert "seed" in problem({"strict": False, "seed": "x"}), "a wrong value stays an error"
    assert any("true or false" in line for line in problems({"strict": "no", "made_up": 1}))


def test_no_key_of_deepspeed_is_unknown():
    """deepspeed_keys.txt: every key that DeepSpeed's source reads (its pydantic models and `param_dict.get` calls), at
    commit edaa7221 of August 2026.
    """
    theirs = (Path(__file__).parent / "deepspeed_keys.txt").read_text().split()
    assert len(set(theirs)) == len(theirs) > 300
    known = {*screen.KNOWN, *keys.KEYS, *aliases.DEPRECATED}
    assert [key for key in theirs if aliases.renamed(key) not in known] == []
    settings = {key for key, row in keys.KEYS.items() if row.fate != "ignored"} | set(screen.FIELDS)
    assert set(aliases.RENAMED.values()) - {"tensor_parallel.tp"} <= settings, "every other name is that of a key"


ROUTING = {"enabled": True, "random_ltd": {"enabled": True, "random_ltd_schedule": {"min_value": 128}}}


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        # A tool beside the training. docs/_pages/training.md; its autotuner takes both from the launcher.
        ({"autotuning": {"enabled": True, "num_nodes": None, "num_gpus": None}}, ["autotuning.enabled"]),
        # tests/unit/v1/zero/test_stage2_flatten_on_gpu.py
        ({"fp32": {"enabled": True}}, ["fp32"]),
        # A section that is nested in its own examples, one level or more too high
        ({"random_ltd": {"enabled": True}, "data_routing": {"enabled": True}}, ["random_ltd", "data_routing"]),
        # The config alone drops no token in DeepSpeed: the script calls data_routing/helper.py, which wraps the layers.
        ({"data_efficiency": {"data_routing": ROUTING}}, ["data_efficiency.data_routing.random_ltd.enabled"]),
        # Remarks are no keys.
        (
            {"# why": {}, "//": "b", "_stage": 3, "comment": 1, "comments_2": [], "mesh": {"comment": "c"},
             "optimizer": {"type": "Adam", "params": {"_lr": 1}}, "zero_optimization": {"_stage": 3}},
            ["# why", "//", "_stage", "comment", "comments_2", "mesh.comment", "optimizer.params._lr",
             "zero_optimization._stage"],
        ),
        ({"compiler_options": {"_xla": True}}, []),
    ],
)  # fmt: skip
def test_what_deepspeed_ignores_is_reported_as_ignored(given, ignored):
    config = Config.load(given)
    assert sorted(entry.key for entry in config.ignored) == sorted(ignored)
    assert not any("unknown" in entry.why for entry in config.ignored)
    assert (config.compiler_options != {}) == ("compiler_options" in given)


# ---------------------------------------------------------------- files of projects

PLACE = Path(os.environ.get("JZERO_DS_CONFIGS") or Path(__file__).resolve().parents[3] / "shared/ds_configs")
FILES = sorted(PLACE.glob("*.json"))
# How the refusals of what jzero does not do begin. Any other refusal is a fault of jzero's reader.
CAUSES = (
    r"zero_optimization\.offload_optimizer\.device = ",
    r"zero_optimization\.offload_param\.device = ",
    r"sequence_parallel_size = \d+: not yet supported",
    r"pipeline\.chunks = \d+: schedule \"1f1b\" has one chunk per stage",
)


@pytest.mark.skipif(not FILES, reason="no directory of configs (JZERO_DS_CONFIGS)")
def test_configs_of_many_projects():
    stopped, wrong = 0, []
    for file in FILES:
        try:
            Config.load(file)
        except ConfigError as error:
            lines, stopped = error.problems, stopped + 1
            causes = [next((cause for cause in CAUSES if re.match(cause, line)), None) for line in lines]
            if None in causes or len(set(causes)) < len(causes) or max(map(len, lines)) > 500:
                wrong.append((file.name, lines))
    assert wrong == []
    assert len(FILES) != 62 or stopped <= 1
