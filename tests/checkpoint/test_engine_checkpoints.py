"""The engine's checkpoints: any layout, a run that continues, mistakes."""

import jax
import numpy as np
import pytest
from helpers.engines import ACCUM, TRAIN, assert_same, build, engine, parts, rows
from helpers.sampling import keep

import jzero


@pytest.mark.parametrize(("stage", "zero", "data"), keep([(0, 1, 1), (1, 2, 1), (3, 8, 1), (3, 4, 2)], [(3, 4, 2)]))
def test_any_checkpoint_loads_on_any_layout(tmp_path, stage, zero, data):
    saved = engine(2)
    for seed in range(2):
        saved.train_batch(rows(seed))
    assert saved.save_checkpoint(tmp_path, client_state={"epoch": 7}).wait() == tmp_path / "global_step2"
    assert (tmp_path / "latest").read_text() == "global_step2"
    batch = {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 1, "train_batch_size": TRAIN}
    loaded, *_ = build(stage, zero=zero, data=data, more=batch, rng=jax.random.key(5))
    path, client_state = loaded.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2")
    assert client_state == {"epoch": 7}
    assert_same((loaded.state.params, loaded.state.opt_state), (saved.state.params, saved.state.opt_state))
    assert_same(*(jax.random.key_data(e.state.rng) for e in (loaded, saved)))
    assert jax.tree.map(lambda x: x.sharding, loaded.state) == loaded.step_fn.state_shardings
    assert (loaded.global_steps, loaded.global_samples, loaded.micro_steps) == (2, 2 * TRAIN, 2 * ACCUM)
    np.testing.assert_allclose(loaded.eval_batch(rows(2)), saved.eval_batch(rows(2)), rtol=1e-6)
    loaded.train_batch(rows(2))
    assert int(loaded.state.step) == 3


def test_a_loaded_run_goes_on_as_the_straight_one(tmp_path):
    straight = engine(3)
    straight.train_batch(rows(0))
    straight.save_checkpoint(tmp_path, tag="here")
    loaded = engine(3)
    loaded.load_checkpoint(tmp_path, tag="here")
    for seed in (1, 2):
        assert straight.train_batch(rows(seed)) == loaded.train_batch(rows(seed))
    assert_same(straight.state.params, loaded.state.params)


def test_checkpoint_mistakes(tmp_path):
    e = engine()
    with pytest.raises(jzero.ConfigError, match="has no default checkpoint"):
        e.load_checkpoint(tmp_path)
    with pytest.raises(jzero.ConfigError, match="does not exist"):
        e.load_checkpoint(tmp_path, tag="no")
    e.client_state = {"best": 1}
    with pytest.raises(jzero.ConfigError, match="client_state is not JSON"):
        e.save_checkpoint(tmp_path, client_state={"x": object()})
    assert e.client_state == {"best": 1}  # which a save on SIGTERM writes
    e.backward(e(parts(0)[0]))
    for call in (lambda: e.save_checkpoint(tmp_path), lambda: e.load_checkpoint(tmp_path)):
        with pytest.raises(jzero.ConfigError, match="1 micro-batches wait for step"):
            call()
