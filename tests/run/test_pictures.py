"""Pictures and the HTML of notebooks: what is drawn is what the arrays, the meshes and the formulas say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.html_pages import Page
from helpers.plain_flax import mean_square
from helpers.refusals import refuses
from helpers.steps import settings, started
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.pictures import drawing, html
from jzero.planner import bytes_by_stage

pytest.importorskip("matplotlib")
WIDTH, CLASSES = 64, 16
CONFIG = settings(32, 3, accum=2, optimizer={"type": "AdamW"}, mesh={"data": 2, "zero": 4})


def linear():
    return jzero.from_flax(lambda rngs: nnx.Linear(WIDTH, CLASSES, rngs=rngs), mean_square)


def drawn(figure):
    figure.canvas.draw()  # every text and shape can be drawn
    assert figure._repr_png_().startswith(b"\x89PNG")
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def _devices(texts):
    return [text for text in texts if text.startswith("device")]


def test_a_mesh_shows_every_device_once():
    """In one colour for each shard."""
    mesh = jzero.make_mesh(pipe=2, data=2)
    figure = jzero.pictures.draw_mesh(mesh)
    texts = drawn(figure)
    boxes = {text: patch.get_facecolor() for text, patch in zip(_devices(texts), figure.axes[0].patches, strict=True)}
    assert sorted(boxes) == [f"device {device.id}" for device in jax.devices()]
    shards = [{boxes[f"device {device.id}"] for device in mesh.devices[:, :, zero].flat} for zero in range(2)]
    assert [len(colours) for colours in shards] == [1, 1]
    assert shards[0] != shards[1]
    assert {"pipe 0", "pipe 1", "data 0", "data 1", "zero 0", "zero 1"} <= set(texts)


SHARDED = [((8, 16), P("zero", "data")), ((2, 8, 4), P("data", None, "zero")), ((32,), P(("data", "zero"))), ((), P())]


@pytest.mark.parametrize(("shape", "spec"), SHARDED)
def test_each_part_is_drawn_with_the_devices_that_hold_it(shape, spec):
    mesh = jzero.make_mesh(data=2)
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    x = jax.device_put(whole, NamedSharding(mesh, spec))
    dims, found = drawing.parts(x)
    held = {device: part for part, devices in found.items() for device in devices}
    assert sorted(held) == [device.id for device in jax.devices()]
    for shard in x.addressable_shards:
        cut = [slice(None)] * max(2, len(shape))
        for dim, span in zip(dims, held[shard.device.id], strict=True):
            cut[dim] = slice(*span)
        part = whole.reshape(shape + (1,) * (2 - len(shape)))[tuple(cut)]
        np.testing.assert_array_equal(part.ravel(), shard.data.ravel())
    texts = drawn(jzero.pictures.draw_sharding(x))
    assert len(texts) == len(found)
    assert ("all 8\ndevices" in texts) == (spec == P())
    titles = [axes.get_title() for axes in jzero.pictures.draw_sharding({"a": x, "b": x}, columns=1).axes]
    assert [title.partition("\n")[0] for title in titles] == ["a", "b"]


@pytest.mark.filterwarnings("error")
def test_the_bars_of_memory_are_the_formula_of_zero():
    """arXiv:1910.02054, section 3: 12 bytes of state, 2 of parameters, 2 of gradients (4 if summed)."""
    found = bytes_by_stage(linear(), CONFIG | {"bf16": {"enabled": True}, "mesh": {"zero": 8}})
    size = WIDTH * CLASSES + CLASSES
    counter = 4 + 4  # the optimizer's and the schedule's step counts are replicated
    expected = {0: (12, 4, 2), 1: (12 / 8, 4, 2), 2: (12 / 8, 4 / 8, 2), 3: (12 / 8, 4 / 8, 2 / 8)}
    figure = jzero.pictures.draw_memory(found, memory=20_000)
    assert len(drawn(figure)) == 4
    for stage, per_parameter in expected.items():
        bars = [container[stage].get_width() for container in figure.axes[0].containers]
        assert bars[1:] == [n * size for n in per_parameter[1:]]
        assert 0 <= bars[0] - per_parameter[0] * size <= counter
        assert found[stage].total == sum(bars)
    assert "a device has 19.5 KiB" in [line.get_label() for line in figure.axes[0].lines]
    refuses(lambda: jzero.pictures.draw_memory({}), "bars is empty: there is nothing to draw")


def test_a_state_shows_its_leaves():
    state = started(linear(), CONFIG)[1]
    rows = {row[0]: row[1:] for row in Page(state._repr_html_()).rows}
    assert rows["params/kernel"] == ["64×16", "float32", "P('zero')", "1.00 KiB"]
    leaves = jax.tree.leaves(state)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves if leaf.dtype != state.rng.dtype)
    total = rows[f"{len(leaves)} leaves"]
    assert total[0] == f"{sum(leaf.size for leaf in leaves):,}"
    assert total[-1] == f"{(held + 8) / 1024:.2f} KiB"  # a threefry key has 8 bytes
    for leaf in leaves:
        leaf.delete()
    page = state._repr_html_()
    assert "TrainState(given to an earlier step, parameters=1,040 in 2 leaves)" in page
    assert ["params/bias", "16", "float32", "P('zero')", "16 B"] in Page(page).rows
    tree = {f"p{i:03}": jax.ShapeDtypeStruct((i + 1,), jnp.float32) for i in range(100)}
    rows = Page(html.leaves(tree)).rows
    assert len(rows) == 1 + html.MOST_LEAVES + 2
    assert [row[0] for row in rows[-2:]] == ["… and 60 more", "100 leaves"]
    assert rows[-1][1] == f"{sum(range(101)):,}"
    name = "<script>&"
    pages = html.leaves({name: jnp.ones(2)}), html.facts({name: name}), html.text(name), html.folded(name, "")
    assert "<script" not in "".join(pages)
    assert Page(pages[0]).rows[1][0] == name  # unescaped by the parser


def test_an_engine_shows_mesh_batch_and_report():
    engine = jzero.initialize(model=linear(), config=CONFIG)[0]
    page = engine._repr_html_()
    rows = Page(page).rows
    assert ["batch", "32 = 2 per device × 2 accumulation × 8 replicas"] in rows
    assert ["data 1", *(f"device {d.id}" for d in engine.mesh.devices[0, 1].flat)] in rows
    assert "jzero run report" in page
    assert ["kernel", "64×16", "float32"] in Page(linear()._repr_html_()).rows  # a model alone
    assert "8 x cpu = data 2 x zero 4" in page
