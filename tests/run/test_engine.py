"""The DeepSpeed-shaped engine: two ways to run a step, one set of numbers; counters and mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import engines
from helpers.engines import LINE, Net, assert_same, build, config, engine, parts, parts_of, rows, three_calls
from helpers.refusals import refused, refuses
from helpers.steps import mesh

import jzero
from jzero import events


def test_no_sync_is_legal_at_stage_3():
    inside, plain = (build(3, model=LINE)[0] for _ in range(2))
    *first, last = parts(0)
    with inside.no_sync():
        for micro_batch in first:
            inside.backward(inside(micro_batch))
        refuses(inside.step, r"step\(\) inside no_sync")
        refuses(inside.no_sync().__enter__, r"no_sync\(\) inside no_sync")
    three_calls(inside, [last])
    three_calls(plain, parts(0))
    assert inside.global_steps == 1
    assert_same(inside.state.params, plain.state.params)


def test_the_boundary_is_counted_or_set_by_hand():
    e, seen = build(model=LINE)[0], []
    for micro_batch in parts(0):
        before = e.is_gradient_accumulation_boundary()
        e.backward(e(micro_batch))
        seen.append((before, e.is_gradient_accumulation_boundary()))
        e.step()
    assert seen == [(False, False), (False, False), (True, True)]
    for boundary, micro_batches, steps in ((False, engines.ACCUM, 1), (True, 1, 2), (None, engines.ACCUM, 3)):
        e.set_gradient_accumulation_boundary(boundary)
        three_calls(e, parts(1, micro_batches))
        assert e.global_steps == steps
    assert e.micro_steps == 3 * engines.ACCUM + 1


gradient_of = jax.jit(jax.grad(lambda w, batch: LINE.loss({"w": w}, batch, None)))


# DeepSpeed's engine.backward divides each loss by gradient_accumulation_steps, unless scale_wrt_gas is false, and adds.
@pytest.mark.parametrize(
    ("accum", "calls", "more", "scale"),
    [
        (2, "b step bb step", {}, 1 / 2),
        (4, "b step", {"managed_gradient_accumulation": False}, 1 / 4),
        (3, "uuu step", {"fp16": {"enabled": True, "initial_scale_power": 4}}, 1),
    ],
)
def test_backward_calls_before_a_step_are_summed(accum, calls, more, scale):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    e, *_ = build(3, model=LINE, more={"gradient_accumulation_steps": accum, **sgd, **more})
    before, expected = jax.device_get(e.state.params["w"]), 0
    batches = iter(parts(0, 4))
    for word in calls.split():
        if word == "step":
            e.step()
            continue
        for letter in word:
            batch = next(batches)
            expected += scale * np.asarray(gradient_of(before, batch))
            e.backward(e(batch), **({} if letter == "b" else {"scale_wrt_gas": False}))
    assert e.global_steps == 1
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if "fp16" in more else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(e.state.params["w"], before - 0.1 * expected, **tolerance)
    np.testing.assert_allclose(e.get_global_grad_norm(), np.linalg.norm(expected), **tolerance)


def test_the_loss_of_a_micro_batch():
    """Read before its step, by a forward pass of its own, or after it, also when it was just given: the same."""
    early, late, whole = engine(3), engine(3), engine(3)
    values, losses, given = [], [], []
    late.on(events.StepGiven, lambda event: given.extend(float(loss) for loss in losses))
    for micro_batch in parts(0):
        loss = early(micro_batch)
        values.append(float(loss))
        assert early.backward(loss) is loss
        early.step()
        losses.append(late(micro_batch))
        late.backward(losses[-1])
        late.step()
    np.testing.assert_allclose([x.item() for x in losses], values, rtol=1e-6)
    assert given == [float(loss) for loss in losses]
    assert np.asarray(losses[0]) == losses[0].item()
    assert not hasattr(losses[0], "_a_protocol_of_copies")
    assert len(set(values)) == engines.ACCUM
    weights = [micro_batch["mask"].sum() for micro_batch in parts(0)]
    np.testing.assert_allclose(np.average(values, weights=weights), whole.train_batch(iter(parts(0))), rtol=1e-6)
    for one in (early, whole):  # the three calls and train_batch are the same bit for bit
        assert (one.global_steps, one.global_samples, one.micro_steps) == (1, engines.TRAIN, engines.ACCUM)
        assert one.get_global_grad_norm() == late.get_global_grad_norm()
        assert_same((one.state.params, one.state.opt_state), (late.state.params, late.state.opt_state))


def test_evaluation():
    e, batch = engine(), rows(0)
    before = jax.device_get(e.state.params)
    loss = float(e.eval_batch(batch))
    total, count = jax.jit(Net().loss)(jax.tree.map(jnp.asarray, before), batch, None)
    np.testing.assert_allclose(loss, total / count, rtol=1e-6)
    part = parts_of(batch)[0]
    np.testing.assert_allclose(e.eval_batch(part), e.eval()(part))
    np.testing.assert_allclose(e.eval_batch(data_iter=iter(parts_of(batch))), loss, rtol=1e-6)
    assert not isinstance(e(part), type(e.train()(part)))  # an array, and a promise
    assert_same(e.state.params, before)
    assert (e.global_steps, e.micro_steps) == (0, 0)


def test_wrong_batches_name_the_leaf_the_shape_and_the_equation():
    e = engine()
    equation = r"train_batch_size 24 = micro-batch 2 x accumulation 3 x 4 replicas"
    for call, batch, words in (
        (e.train_batch, rows(0, 23), rf"leaf 'mask' has shape \(23,\).* must be 24 \({equation}\)"),
        (e, rows(0), rf"leaf 'mask' has shape \(24,\).* must be 8 \({equation}\)"),
        (e.train_batch, iter([{**p, "x": p["x"][:3]} for p in parts(0)]), r"leaf 'x' has shape \(3, 8\)"),
        (e.train_batch, {**rows(0), "mask": np.float32(1)}, r"leaf 'mask' has shape \(\)"),
        (e.train_batch, {}, "contains no arrays"),
        (e.eval_batch, rows(0, 9), r"leaf 'mask' has shape \(9,\).*a multiple of 8"),
    ):
        refuses(lambda call=call, batch=batch: call(batch), words)
    assert e.global_steps == 0
    e.train_batch(rows(0))  # nothing was donated


def test_calls_out_of_order_and_with_other_keywords():
    e = engine()
    loss = e(parts(0)[0])
    e.train_batch(rows(0))
    refuses(loss.__float__, "read it before")  # its parameters are gone
    for call, words in (
        (e.train_batch, r"no batch: pass one, or pass training_data"),
        (lambda: e.train_batch(iter(parts(0, 2))), r"ended after 2 of 3 micro-batches.*RepeatingLoader"),
        (e.step, r"step\(\) without a backward\(\)"),
        (e.module, "from_flax"),
    ):
        refuses(call, words)
    first, second = e(parts(0)[0]), e(parts(0)[1])
    for foreign in (first, 2 * float(second), jnp.float32(1)):
        refuses(lambda x=foreign: e.backward(x), r"is not the loss that the last engine\(micro_batch\) returned")
    e.backward(second)
    for call, words in (
        (lambda: e.backward(second), "is not the loss"),  # twice
        (lambda: e.train_batch(rows(0)), r"1 micro-batches wait for step\(\)"),
        (lambda: e.set_train_batch_size(engines.UNIT), r"1 micro-batches wait for step\(\)"),
        (lambda: e.backward(e(parts(0)[2]), scale_wrt_gas=False), r"scale_wrt_gas = False: .* of a step differ"),
        (lambda: e.backward(e(parts(0)[2]), retain_graph=True), r"backward\(retain_graph=...\): leave it out"),
        (lambda: e.step(lr_kwargs={"epoch": 1}), r"step\(lr_kwargs=...\): leave it out"),
        (lambda: e.step(closure=None), r"step\(closure=...\): unknown argument"),
    ):
        refuses(call, words)


def test_what_initialize_refuses():
    given = {"model": Net(), "config": config(), "mesh": mesh()}
    for more, words in (
        ({"resume": True}, "resume = True: must be a directory"),
        ({"resume": "auto"}, 'resume = "auto": no directory is set; put checkpoint.dir into the config'),
        ({"optimizer": optax.sgd(0.1), "lr_scheduler": lambda n: 0.1}, "scheduler: the optimizer passed in has"),
        ({"lr_scheduler": 0.1}, "lr_scheduler: 0.1 is not a function"),
        ({"optimizer": "adam"}, "neither an optax.GradientTransformation nor a function"),
        ({"model_parameters": []}, "initialize(model_parameters=...): leave it out: the model makes its own"),
        ({"modle": None}, "initialize(modle=...): unknown argument"),
    ):
        refused(lambda more=more: jzero.initialize(**given, **more), words)


def test_training_data():
    """Its position moves with the engine's global batches, whose size changes."""
    e, _, loader, _ = build(model=LINE, training_data=rows(0, 7 * engines.UNIT))
    e.train_batch()
    assert loader.position == {"epoch": 0, "samples": engines.TRAIN}
    e.set_train_batch_size(2 * engines.UNIT)
    for _ in range(4):
        e.train_batch()
    assert loader.position == {"epoch": 1, "samples": 4 * engines.UNIT}  # 3 + 2 x 2 micro-batches, then the next epoch
    assert (e.global_steps, e.global_samples) == (5, engines.TRAIN + 4 * 2 * engines.UNIT)


def test_a_micro_batch_of_the_loader_is_not_copied():
    engine, _, loader, _ = build(model=LINE, training_data=rows(0))
    batch = next(iter(loader))
    placed = engine.step_fn.place_micro_batch(batch)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(batch), strict=True))
