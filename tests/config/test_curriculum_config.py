"""The keys of curriculum learning in a config: what loads, and what is refused with which words."""

import pytest
from helpers.configs import problem, problems
from helpers.curricula import LEGACY, NEWER

import jzero
from jzero.config import Config
from jzero.data.curriculum import curriculum_of


def test_a_curriculum_that_is_off_loads():
    assert curriculum_of(Config.load({"curriculum_learning": {**LEGACY, "enabled": False}})) is None
    sampling = {"enabled": True, "num_epochs": 3, "pin_memory": True, "curriculum_learning": {"enabled": False}}
    config = Config.load({"data_efficiency": {"enabled": True, "data_sampling": sampling}})
    assert curriculum_of(config) is None
    assert [r.key.rpartition(".")[2] for r in config.replaced] == ["num_epochs", "pin_memory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_difficulty": None}, "curriculum_learning.min_difficulty: required with enabled = true"),
        ({"schedule_type": None}, "curriculum_learning.schedule_type: required with enabled = true"),
        ({"schedule_config": {"difficulty_step": 8}}, "schedule_config.total_curriculum_step: required with"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree: required with enabled = true and"),
        ({"min_difficulty": 13}, "min_difficulty = 13 and max_difficulty = 12: the minimum must not be above"),
        ({"min_difficulty": 3}, "min_difficulty = 3 and schedule_config.difficulty_step = 4: lengths are multiples"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [4, 8], "max_step": [1, 2]}},
            "schedule_config.max_step: has 2 entries, and difficulty 2; it must have one less"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [4, 8, 12], "max_step": [2, 2]}},
            "schedule_config.max_step = [2, 2]: the steps must increase"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [4, 16], "max_step": [2]}},
            "schedule_config.difficulty = [4, 16]: must not be above max_difficulty 12"),
        ({"curriculum_type": "voc"}, 'curriculum_learning.curriculum_type = "voc": must be "seqlen"'),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_work(change, message):
    assert message in problem({"curriculum_learning": {**LEGACY, **change}})


def test_a_wrong_value_is_the_only_problem():
    """Not also that the key is missing, because the default took the place of the wrong value."""
    with pytest.raises(jzero.ConfigError) as error:
        jzero.Config.load({"curriculum_learning": {**LEGACY, "min_difficulty": "eight"}})
    assert [text.split(":")[0] for text in error.value.problems] == ['curriculum_learning.min_difficulty = "eight"']


def newer(**metrics):
    learning = {"enabled": True, "curriculum_metrics": metrics}
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}}


METRIC = NEWER["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["seqlen_truncate"]


def test_the_newer_keys_that_do_not_work():
    assert "curriculum_metrics.seqlen: required with enabled = true" in problem(newer())
    assert "sort training_data yourself" in problem(newer(seqlen={**METRIC, "clustering_type": "schedule_based"}))
    assert "is another name of" in problem(newer(seqlen=METRIC, seqlen_truncate=METRIC))
    assert "both set the length of the sequences; keep one" in problem(
        newer(seqlen=METRIC) | {"curriculum_learning": LEGACY}
    )
    off = newer(seqlen=METRIC)
    off["data_efficiency"]["data_sampling"]["enabled"] = False
    assert "data_sampling.enabled = false and" in problem(off)
    assert len(problems(off)) == 1


@pytest.mark.parametrize("metric", ["vocabularyrarity", "seqlen_reshape", "dummy_metric", "my.metric"])
def test_a_metric_of_any_name_is_known(metric):
    """DeepSpeed's metrics have names of the user's choice; with the curriculum off it reads none of them."""
    given = {**METRIC, "difficulty_type": "value", "clustering_type": "schedule_based"}
    for metrics in ({metric: given}, {metric: given, "seqlen": METRIC}):
        config = newer(**metrics)
        (text,) = problems(config)
        assert text.startswith(
            f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.{metric}: not yet"
        )
        assert "sort training_data yourself" in text
        assert problems({**config, "strict": False}) == (text,), "it would change the run"
    config = newer(**{metric: given})
    config["data_efficiency"]["data_sampling"]["curriculum_learning"]["enabled"] = False
    assert curriculum_of(Config.load(config)) is None


def test_random_ltd_is_reported_as_ignored():
    """The config alone drops no token in DeepSpeed: the script calls data_routing/helper.py, which wraps the layers."""
    ltd = {"enabled": True, "total_layer_num": 12, "random_ltd_schedule": {"min_value": 128}, "micro_batch_size": 4}
    routing = {"enabled": True, "random_ltd": ltd}
    (entry,) = Config.load({"data_efficiency": {"enabled": True, "data_routing": routing}}).ignored
    assert entry.key == "data_efficiency.data_routing.random_ltd.enabled"
    assert "convert_to_random_ltd" in entry.why
    ltd["enabled"] = False
    assert Config.load({"data_efficiency": {"data_routing": routing}}).ignored == ()
