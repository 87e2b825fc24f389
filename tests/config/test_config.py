"""Configs: what loads, from where, sizes and degrees, what DeepSpeed's files have besides settings, all mistakes.

DeepSpeed's names are those of its source: runtime/zero/config.py (`alias`), runtime/config_utils.py (pydantic's lax
mode) and runtime/config.py (`param_dict.get`, which ignores whatever it does not ask for).
"""

import base64
import copy
import json
import pickle
from pathlib import Path

import hypothesis
import pytest
from helpers.configs import TUTORIAL_ZERO3, problem, problems
from helpers.refusals import refuses
from helpers.stored_cases import check_cases
from hypothesis import strategies as st

from jzero import config as config_module
from jzero.config import Config, aliases, keys, screen
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
    file.write_text('{"steps_per_print": Infinity}')  # as accelerate writes it
    assert Config.load(file).steps_per_print is None


def test_what_is_no_source(tmp_path):
    file = tmp_path / "ds.json"
    message = problem(str(file))
    assert [part for part in ("ds.json", "no such file", "hjson", "dict", "base64") if part not in message] == []
    for content, words in (
        (b'{"seed": [1,', "neither JSON nor hjson"), (b"[1, 2]", "must be a JSON object"),
        (b"\xff\xfe\xff", "cannot be read"),
    ):  # fmt: skip
        file.write_bytes(content)
        assert words in problem(str(file))
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


def test_each_mistake_is_one_line(pytestconfig):
    """No contradiction follows from a key that is misspelled."""

    def outcome(given):
        (line,) = refuses(lambda: Config.load(given).mesh_degrees(8)).splitlines()
        return line

    check_cases(Path(__file__).with_name("mistakes.jsonl"), outcome, pytestconfig)
    assert problem({3: 4}).startswith("3 = 4: unknown key")


def test_what_loads(pytestconfig):
    """The values in their types, what is replaced, ignored or left open, and the mesh of eight devices."""

    def outcome(given):
        config = Config.load(given)
        found = {
            "config": repr(config),
            "precision": config.precision,
            "recomputed": getattr(config.activation_checkpointing, "kind", None),
            "open": config.autos,
            "replaced": [f"{key}: {by}" for key, _, by in config.replaced],
            "ignored": [f"{key}: {why}" for key, _, why in config.ignored],
            "mesh": {axis: degree for axis, degree in config.mesh_degrees(8).items() if degree > 1},
            "curricula": [*config.curricula],
        }
        return json.loads(json.dumps({name: value for name, value in found.items() if value}))

    check_cases(Path(__file__).with_name("loads.jsonl"), outcome, pytestconfig)
    assert type(Config.load({"gradient_clipping": True}).gradient_clipping) is float


def test_all_problems_come_at_once(pytestconfig):
    check_cases(Path(__file__).with_name("problems.jsonl"), lambda given: [*problems(given)], pytestconfig)
    with pytest.raises(ConfigError, match="- seed = ") as error:
        Config(seed="x", stage=1)
    assert len(error.value.problems) == 2, "the constructor checks like load"


def test_an_optimizer_needs_little_but_its_type():
    for name in (*table.DEEPSPEED, *table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER):
        assert Config.load({"optimizer": {"type": name, "params": {}}}).optimizer.params == {}


def nest(path, value):
    """Return a config with a key of this dotted path, and with the types that its section needs."""
    section, types = path.partition(".")[0], {"optimizer": "Adam", "scheduler": "WarmupLR"}
    for key in reversed(path.split(".")):
        value = {key: value}
    if section in types:
        value[section]["type"] = types[section]
    return value


def test_every_replaced_or_ignored_key_loads_and_is_reported():
    assert not set(screen.FIELDS) & set(keys.KEYS)  # no row hides a field
    for path in filter(keys.is_replaced, keys.KEYS):
        row = keys.KEYS[path]
        value = next(v for v in (True, 4, ["a"], "fp32", "info", "Fail") if _parses(row.kind, v))
        (entry,) = Config.load(nest(path, value)).replaced
        assert entry == (path, value, row.text)
        message = problem(nest(path, {"a": 1}))
        assert message.startswith(f'{path} = {{"a": 1}}: must be')
        assert message.endswith(f"; or leave it out (replaced by {row.text})")
    for path in (path for path, row in keys.KEYS.items() if row.fate == "ignored"):
        config = Config.load(nest(path, 3))
        assert (config.ignored, config.replaced) == (((path, 3, keys.KEYS[path].text),), ())


def _parses(kind, value) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


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


sizes = st.none() | st.integers(1, 64)
TRAIN, MICRO, ACCUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.none() | st.integers(1, 200), sizes, sizes, st.integers(1, 16), st.booleans())
def test_batch_is_consistent_or_its_advice_is(train, micro, accum, replicas, fits):
    """Sizes that are given stay, and the accumulation is one step unless two others give it."""
    if train and fits:  # free numbers seldom do
        train = (micro or 1) * (accum or 1) * replicas * (1 if micro and accum else train)
    config = {TRAIN: train, MICRO: micro, ACCUM: accum}
    hypothesis.assume(train or micro)
    try:
        got = Config.load(config).batch(replicas)
    except ConfigError as error:
        assert train % ((micro or 1) * (accum or 1) * replicas) or (micro and accum)
        advice = str(error).split("nearest valid: ")[1]
        for fix in advice.split(", or "):
            key, values = fix.split(" = ")
            for value in values.split(" or "):
                fixed = Config.load({**config, key: int(value)}).batch(replicas)
                assert fixed.train == fixed.micro * fixed.accum * replicas
    else:
        assert got.train == got.micro * got.accum * replicas
        found = {TRAIN: got.train, MICRO: got.micro, ACCUM: got.accum}
        assert found.items() >= {key: value for key, value in config.items() if value}.items()
        assert accum or got.accum == 1 or (train and micro)
        assert got.inferred == ", ".join(f"{key} = {value}" for key, value in found.items() if not config[key])


axis = st.none() | st.integers(1, 8)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.integers(1, 32), axis | st.just(-1), axis, st.integers(-1, 8).filter(bool))
def test_mesh_degrees_use_every_device_or_say_what_fits(devices, data, zero, mics):
    """A shard size sets zero and leaves the rest to data."""
    mesh = {k: v for k, v in (("data", data), ("zero", zero)) if v}
    source = {"mesh": mesh, "zero_optimization": {"mics_shard_size": mics}}
    if mics > 0 and zero not in (None, mics):
        assert "keep one" in problem(source)
        return
    shard = mics if mics > 0 else zero  # None: the rest
    if data == -1 and shard is None:
        assert "one axis only" in problem(source)
        return
    outer = None if data == -1 else data or (None if mics > 0 else 1)
    fixed = (shard or 1) * (outer or 1)
    if devices % fixed == 0 if None in (shard, outer) else devices == fixed:
        got = Config.load({**source, "data_parallel_size": devices}).mesh_degrees(devices)
        degrees = {"data": outer or devices // fixed, "zero": shard or devices // fixed}
        expected = {"pipe": 1, **degrees, "expert": 1, "context": 1, "tensor": 1}
        assert list(got.items()) == list(expected.items())
    else:
        refuses(lambda: Config.load(source).mesh_degrees(devices), rf"the number of devices, {devices}; what fits: ")


def test_the_sizes_of_a_run_and_of_a_resume(pytestconfig):
    """A resume keeps the global batch of the run, and of its other sizes what fits."""

    def outcome(case):
        former = [case["former"]] if "former" in case else []
        try:
            return list(Config.load(case["config"]).batch(case["replicas"], *former))
        except ConfigError as error:
            return str(error)

    check_cases(Path(__file__).with_name("batches.jsonl"), outcome, pytestconfig)


def test_a_mesh_of_too_few_devices():
    refuses(lambda: Config().mesh_degrees(0), "num_devices = 0")
    words = "to simulate 8 devices on a CPU, begin with jax"
    refuses(lambda: Config.load({"mesh": {"data": 2}}).mesh_degrees(1), words)
