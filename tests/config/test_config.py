"""Configs: what loads and where it comes from, and mistakes: each is one problem, whose text has these parts."""

import base64
import copy
import json
import pickle
import re

import pytest
from helpers.configs import TUTORIAL_ZERO3, nest, problem, problems
from helpers.curricula import LEGACY, NEWER

import jzero
from jzero import config as config_module
from jzero.config import Config, keys, screen
from jzero.errors import ConfigError
from jzero.optimizers import table


def test_every_source_gives_the_same_config(tmp_path):
    given, text = copy.deepcopy(TUTORIAL_ZERO3), json.dumps(TUTORIAL_ZERO3)
    expected = Config.load(given)
    assert given == TUTORIAL_ZERO3, "load must not change the caller's dict"
    file, with_comment = tmp_path / "ds.json", tmp_path / "ds.hjson"
    file.write_text(text)
    with_comment.write_text("# a comment\n" + text.replace('"train_batch_size"', "train_batch_size"))
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (file, str(file), with_comment, encoded, encoded.rstrip("=")):
        assert Config.load(source) == expected
    assert Config.load(expected) is expected
    assert pickle.loads(pickle.dumps(expected)) == expected
    assert eval(repr(expected), vars(config_module)).model_dump() == expected.model_dump()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"seed": [1,', ["neither JSON nor hjson"]),
        (b"[1, 2]", ["must be a JSON object"]),
        (b"\xff\xfe\xff", ["cannot be read"]),
        (None, ["ds.json", "no such file", "hjson", "dict", "base64"]),
    ],
)
def test_a_file_that_is_no_config(content, parts, tmp_path):
    if content is not None:
        (tmp_path / "ds.json").write_bytes(content)
    message = problem(str(tmp_path / "ds.json"))
    assert [part for part in parts if part not in message] == []


def test_what_is_no_source(tmp_path):
    assert "is a directory" in problem(tmp_path)
    assert problem('{"seed": 1}').endswith("is JSON text, not a path; pass json.loads(text)")
    assert "got int" in problem(3)


@pytest.mark.parametrize("comment", ["", "# hjson\n"])
def test_duplicate_keys_at_any_depth(tmp_path, comment):
    file = tmp_path / "twice.json"
    file.write_text(comment + '{"seed": 1, "seed": 1, "fp16": {"enabled": true, "enabled": false}}')
    first, second = problems(file)
    assert first.startswith("seed: given twice")
    assert second.startswith("fp16.enabled: given twice")
    assert "given twice" in problem(base64.urlsafe_b64encode(b'{"seed": 1, "seed": 2}').decode())


def test_all_problems_come_at_once():
    found = problems({
        "train_batch_sise": 1, "seed": "x", "fp16": {"enabled": True, "hysteresis": -1}, "bf16": {"enabled": True},
        "wandb": {"enabled": "on", "projet": "p"}, "zero_optimization": {"stage": 9, "reduce_bucket_size": "big"},
        "optimizer": {"type": "Adamm"}, "scheduler": {"type": "X"}, "mesh": {"tensor": 0}, "ema": {"decay": 1},
        "curriculum_learning": {"enabled": True},
    })  # fmt: skip
    expected = [
        "train_batch_sise", "seed", "fp16.hysteresis", "fp16.enabled = true and bf16", "wandb.enabled", "wandb.projet",
        "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "optimizer.type: 'Adamm'",
        "scheduler.type: 'X'", "mesh.tensor = 0", "ema.decay", "curriculum_learning.min_difficulty: required",
        "curriculum_learning.max_difficulty: required", "curriculum_learning.schedule_type: required",
    ]  # fmt: skip
    assert sorted(found) == sorted(next(f for f in found if f.startswith(start)) for start in expected)
    assert not any("quotes" in line for line in found if line.startswith("seed")), "advice fits the value"
    several = {
        "optimizer": {"type": "SGD", "params": {"lr": -1, "max_grad_norm": 1.0, "epsilon": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1, "warmup_typ": "log"}},
    }
    keys_of = [re.match(r"[\w.]+", line)[0].split(".params.")[1] for line in problems(several)]
    assert sorted(keys_of) == ["epsilon", "lr", "max_grad_norm", "warmup_num_steps", "warmup_typ"]
    with pytest.raises(ConfigError, match="- seed = ") as error:
        Config(seed="x", stage=1)
    assert len(error.value.problems) == 2, "the constructor checks like load"


def test_an_optimizer_needs_little_but_its_type():
    for name in (*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER):
        assert Config.load({"optimizer": {"type": name, "params": {}}}).optimizer.params == {}


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, "none"),
        ({"partition_activations": True, "contiguous_memory_optimization": True, "profile": True}, "none"),
        ({"cpu_checkpointing": True}, "full"),
        ({"policy": "matmuls", "cpu_checkpointing": True}, "matmuls"),
        ({"policy": "none"}, "none"),
    ],
)
def test_only_what_asks_for_recomputation_gets_it(section, kind):
    assert Config.load({"activation_checkpointing": section}).activation_checkpointing.kind == kind


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("gradient_allreduce_op", "SUM", "sum"),
        ("communication_data_type", "bfloat16", "bf16"),
        ("communication_data_type", "torch.half", "fp16"),
        ("data_types.grad_accum_dtype", None, "fp32"),
        ("gradient_clipping", True, 1.0),
        ("gradient_clipping", False, 0.0),
        ("train_batch_size", 32.0, 32),
        ("frozen_parameters", ["embed.*", "^head$"], ("embed.*", "^head$")),
        ("compiler_options", {"a": True, "b": 1, "c": 1.5, "d": "auto"}, {"a": True, "b": 1, "c": 1.5, "d": "auto"}),
        ("zero_optimization.mics_shard_size", -1, -1),
        ("zero_optimization", True, config_module.ZeroConfig(stage=1)),
        ("bf16.auto_cast", "auto", "auto"),
        ("fp16.initial_scale_power", 127, 127),
        ("fp16.loss_scale", 3e38, 3e38),
        ("fp16.min_loss_scale", 0.25, 0.25),
    ],
)
def test_accepted_values(path, value, expected):
    node = Config.load(nest(path, value))
    for key in path.split("."):
        node = getattr(node, key)
    assert node == expected
    assert type(node) is type(expected)


def test_every_replaced_key_loads_and_is_reported():
    for path in filter(keys.is_replaced, keys.KEYS):
        row = keys.KEYS[path]
        value = next(v for v in (True, 4, ["a"], "fp32", "info", "Fail") if _parses(row.kind, v))
        good, wrong = nest(path, value), nest(path, {"a": 1})
        if path.startswith("optimizer."):
            for given in (good, wrong):
                given["optimizer"]["type"] = "adam"
        (entry,) = Config.load(good).replaced
        assert entry == (path, value, row.text)
        message = problem(wrong)
        assert message.startswith(f'{path} = {{"a": 1}}: must be')
        assert message.endswith(f"; or leave it out (replaced by {row.text})")


def _parses(kind, value) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def test_what_asks_for_nothing_loads_in_silence():
    """The default of every key is in tests/golden/config.json."""
    given = {
        "tensorboard": {}, "nebula": False, "elasticity": {"enabled": False, "min_gpus": 2}, "aio": {},
        "pipeline": {"stages": "auto"}, "sequence_parallel_size": 1, "sparse_attention": {}, "log_level": None,
        "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}, "keep_module_on_host": False},
        "checkpoint": {"use_node_local_storage": False, "writer": {}}, "amp": {"enabled": False},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"}, "vocabulary_size": None, "mesh": {"pipe": 1},
        "autotuning": {"enabled": "auto", "fast": True}, "optimizer": None, "compile": {"passes": None},
        "zero_optimization": {
            "offload_param": {"device": "none"}, "offload_optimizer": None, "cpu_offload": False, "zenflow": {},
            "zero_quantized_weights": False, "zeropp_loco_param": None, "overlap_comm": None,
        },
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}},
        },
    }  # fmt: skip
    config = Config.load(given)
    assert repr(config) == str(config) == "Config()"
    assert (config.replaced, config.ignored) == ((), ())


def test_no_row_hides_a_field():
    assert not set(screen.FIELDS) & set(keys.KEYS)


ON, AUTO = {"enabled": True}, {"type": "auto", "params": {"lr": "auto"}}
CLIP = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}
MASTER = "master_weights_and_grads"
TENSOR = "= 4: both are the degree of tensor; keep one"
METRIC = NEWER["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["seqlen_truncate"]
DISCRETE = {"schedule_type": "fixed_discrete"}


def assert_problem(given, *parts):
    message = problem(given)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("train_batch_size", "32", ['train_batch_size = "32"', "positive integer", "without quotes"]),
        ("train_batch_size", 0, ["= 0", "positive integer"]),
        ("gradient_accumulation_steps", True, ["= true", "positive integer"]),
        ("gradient_clipping", -1, ["gradient_clipping = -1", "a non-negative number, true", "default 1.0"]),
        ("communication_data_type", "int8", ['communication_data_type = "int8"', '"fp32", "fp16", "bf16" or null']),
        ("gradient_allreduce_op", "maen", ['"mean" or "sum"', 'did you mean "mean"']),
        ("zero_optimization.stage", 4, ["zero_optimization.stage = 4", "0, 1, 2 or 3"]),
        ("zero_optimization.mics_shard_size", 0, ["-1 or a positive integer"]),
        ("zero_optimization.stage3_param_persistence_threshold", -1, ["non-negative integer", "100000"]),
        ("dataloader_drop_last", "true", ["true or false", "without quotes", "default false"]),
        ("fp16.loss_scale_window", 2**31, ["an integer >= 1 and <= 2147483647", "default 1000"]),
        ("fp16.min_loss_scale", 0, ["= 0", "a number > 0 in float32's range", "default 1.0"]),
        ("fp16.min_loss_scale", 1e-46, ["1e-46", "a number > 0 in float32's range"]),
        ("bf16.auto_cast", "yes", ['true, false or "auto"']),
        ("steps_per_print", -float("inf"), ["a positive integer, Infinity (never) or null"]),
        ("optimizer", {"type": "Adam", "params": {"lr": "1e-3"}}, ["optimizer.params.lr", "'1e-3'", "number >= 0"]),
        ("optimizer.params", {"lr": 1}, ["optimizer.type: required", "AdamW"]),
        ("scheduler", {"type": "OneCycle", "params": [1]}, ["scheduler.params = [1]", "names and values"]),
        ("optimizer", "Adam", ["must be a section", "state_dtype, type", 'did you mean {"type": "Adam"}?']),
        ("aio", 3, ["must be a section", "queue_depth"]),
        ("frozen_parameters", ["ok", "("], ['"(" does not compile', "regular expressions"]),
        ("frozen_parameters", [1], ["1 is not a string"]),
        ("trainable_parameters", "lora_", ['write ["lora_"]', "or null"]),
        ("compiler_options", {"a": [1]}, ["a = [1]", "true, false, a number or a string"]),
    ],
)
def test_a_wrong_value(path, value, parts):
    assert_problem(nest(path, value), *parts)
    assert problem(nest(path, value)).startswith(path.split(".")[0])


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("grandient_accumulation_steps", 'did you mean "gradient_accumulation_steps"?'),
        ("Train_Batch_Size", 'did you mean "train_batch_size"?'),
        ("zero_optimization.gradient_clipping", "it belongs at the top level"),
        ("stage", "it belongs in zero_optimization"),
        ("stge", "did you mean zero_optimization.stage?"),
        ("lr", "it belongs in optimizer.params"),
        ("bf16.fp16", "the keys here are auto_cast, bf16_master_weights_and_grads, bf16_optimizer_states, check_grad_"),
        ("checkpoint.writer.typ", 'did you mean "type"?'),
        ("qqqq", 'docs/configuration.md lists all, and "strict": false makes this a warning'),
    ],
)
def test_unknown_key(path, advice):
    message = problem(nest(path, 7))
    assert message.startswith(f"{path} = 7: unknown key; ")
    assert advice in message
    assert len(message) < 170


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"fp16": ON, "bf16": ON}, ["fp16.enabled = true and bf16.enabled = true", "only one", "remove"]),
        ({"bf16": {"bf16_optimizer_states": True}}, ["needs bf16.bf16_master_weights_and_grads"]),
        ({"mesh": {"data": -1}}, ["mesh.data = -1 and mesh.zero = -1", "one axis only", "default of mesh.zero"]),
        (CLIP, ["optimizer.params.max_grad_norm = 1.0", '"gradient_clipping"', "top level"]),
        ({"activation_checkpointing": {"policy": "none", "cpu_checkpointing": True}}, ["= true", 'policy "full"']),
        ({"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none"}}},
            ["cpu_offload = false", "deprecated name of zero_optimization.offload_optimizer"]),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, ["autotp_size = 2 and ", TENSOR]),
        ({"tensor_parallel": {"autotp_size": 2}, "mesh": {"tensor": 4}}, ["autotp_size = 2 and ", TENSOR]),
        ({"zero_optimization": 3, "mesh": {"data": -1}}, ["zero_optimization = 3: must be a section", "_shard_size, "]),
        ({"bf16": {"bf16_optimizer_states": True, f"bf16_{MASTER}": "yes"}}, [f"bf16.bf16_{MASTER} = "]),
        ({"zero_optimization.stage": 3}, ["nested sections"]),
        ({3: 4}, ["3 = 4: unknown key"]),
        ({"fp16": {"a.b": 4}}, ["fp16.a.b = 4: unknown key"]),
        ({"learning_rate": 1e-3}, ["write it as optimizer.params.lr"]),
        ({"optimizer": {"type": "MuSGD"}}, ["Use Adam, AdamW, ", "docs/configuration.md"]),
        (nest("optimizer.type", "DeepSpeedCPUAdam"), ['write "type": "Adam" and zero_opt', '{"device": "cpu"}']),
        ({"zero_optimization": {"offload_optimizer": True}}, ['did you mean {"device": "cpu"}?']),
        ({"amp": {"enabled": True, "opt_level": "O3"}}, ['amp.opt_level = "O3"', "fp16_master_weights_and_grads"]),
        ({"amp": {"enabled": True, "loss_scale": "big"}}, ['amp.loss_scale = "big"', '"dynamic" or a positive number']),
        ({"amp": ON, "bf16": ON}, ["amp.enabled = true: means fp16, and bf16.enabled = true bf16; keep one"]),
        ({"torch_autocast": {**ON, "dtype": "int8"}}, ['dtype = "int8"', '"bfloat16" or "float16"']),
        ({"torch_autocast": {**ON, "dtype": "bf16"}, "fp16": ON}, ["true: means bf16", "fp16.enabled = true"]),
        (nest("optimizer", AUTO), ['optimizer.type = "auto": ', 'write "type": "AdamW", the Trainer\'s optimizer']),
        (nest("scheduler", AUTO), ['scheduler.type = "auto": ', "or leave the section out for a constant rate"]),
        ({"fp16": {**ON, "type": "bfloat16"}}, ['write "bf16": {"enabled": true}']),
        # What jzero does not do, by name: each one line, whose number of keys does not matter.
        (nest("elasticity.enabled", True), ["elasticity.enabled = true: not yet supported: ", "only false"]),
        ({"progressive_layer_drop": {**ON, "theta": 0.5}}, ["not yet supported: ", "progressive layer dropping"]),
        ({"compression_training": {"row_pruning": {"shared_parameters": ON}}}, ["masks in the model"]),
        (nest("zero_optimization.zeropp_loco_param", {"err_beta": 0.8, "reset_T": 1024}),
            ["param.err_beta = 0.8, zero_optimization.zeropp_loco_param.reset_T = 1024: not yet supported: "]),
    ],
)  # fmt: skip
def test_contradictions_and_slips(given, parts):
    assert_problem(given, *parts)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"optimizer": {"typ": "Adam"}}, 'optimizer.typ = "Adam": unknown key; did you mean "type"?'),
        ({"optimizer": {"type": 3}}, "optimizer.type = 3: must be a string"),
        ({"zero_optimization": {"stge": 3, "zero_quantized_weights": True}}, "zero_optimization.stge = 3: unknown key"),
        ({"bf16": {"bf16_optimizer_states": True, "bf16_masterweights_and_grads": True}}, "bf16.bf16_masterweights"),
        ({"optimizer": {"type": "Adam", "params": {"zero": {"a": "b" * 500}}}}, "optimizer.params.zero: unknown par"),
        ({"curriculum_learning": {**LEGACY, "min_difficulty": "eight"}}, "curriculum_learning.min_difficulty = "),
    ],
)
def test_a_misspelled_key_is_one_short_line(given, start):
    """No contradiction follows from a key that was meant to be there."""
    line = problem(given)
    assert line.startswith(start)
    assert len(line) < 250


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule_config": {"difficulty_step": 8}}, "schedule_config.total_curriculum_step: required with"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree: required with enabled = true and"),
        ({"min_difficulty": 13}, "min_difficulty = 13 and max_difficulty = 12: the minimum must not be above"),
        ({"min_difficulty": 3}, "min_difficulty = 3 and schedule_config.difficulty_step = 4: lengths are multiples"),
        (DISCRETE | {"schedule_config": {"difficulty": [4, 8], "max_step": [1, 2]}},
            "schedule_config.max_step: has 2 entries, and difficulty 2; it must have one less"),
        (DISCRETE | {"schedule_config": {"difficulty": [4, 8, 12], "max_step": [2, 2]}},
            "schedule_config.max_step = [2, 2]: the steps must increase"),
        (DISCRETE | {"schedule_config": {"difficulty": [4, 16], "max_step": [2]}},
            "schedule_config.difficulty = [4, 16]: must not be above max_difficulty 12"),
        ({"curriculum_type": "voc"}, 'curriculum_learning.curriculum_type = "voc": must be "seqlen"'),
    ],
)  # fmt: skip
def test_a_curriculum_that_does_not_work(change, message):
    assert message in problem({"curriculum_learning": {**LEGACY, **change}})


def newer(sampling=True, enabled=True, **metrics):
    learning = {"enabled": enabled, "curriculum_metrics": metrics}
    given = {"enabled": sampling, "curriculum_learning": learning, "num_epochs": 3, "pin_memory": True}
    return {"data_efficiency": {"enabled": True, "data_sampling": given}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (newer(), "curriculum_metrics.seqlen: required with enabled = true"),
        (newer(seqlen={**METRIC, "clustering_type": "schedule_based"}), "sort training_data yourself"),
        (newer(seqlen=METRIC, seqlen_truncate=METRIC), "is another name of"),
        (newer(seqlen=METRIC) | {"curriculum_learning": LEGACY}, "both set the length of the sequences; keep one"),
        (newer(sampling=False, seqlen=METRIC), "data_sampling.enabled = false and"),
    ],
)
def test_a_curriculum_by_its_newer_name_that_does_not_work(given, words):
    assert_problem(given, words)


@pytest.mark.parametrize("others", [{}, {"seqlen": METRIC}])
def test_a_metric_of_any_name_is_known(others):
    """DeepSpeed's metrics have names of the user's choice; with the curriculum off it reads none of them."""
    given = newer(
        **{"my.metric": {**METRIC, "difficulty_type": "value", "clustering_type": "schedule_based"}}, **others
    )
    text = problem(given)
    assert text.startswith("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.my.metric: not yet")
    assert "sort training_data yourself" in text
    assert problems({**given, "strict": False}) == (text,), "it would change the run"


def test_a_curriculum_that_is_off_loads():
    config = jzero.Config.load({"curriculum_learning": {**LEGACY, "enabled": False}, **newer(enabled=False, any={})})
    assert config.curricula == {}
    assert [r.key.rpartition(".")[2] for r in config.replaced] == ["num_epochs", "pin_memory"]
