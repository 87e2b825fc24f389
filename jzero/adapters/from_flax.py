"""`from_flax`: Flax modules as models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx

from jzero.adapters.linen_layers import LinenLayers
from jzero.adapters.linen_model import LinenModel
from jzero.adapters.methods import FlaxModel, add_criterion, inputs_and_labels, outputs_of, with_rng
from jzero.adapters.nnx_layers import LISTS, NNXLayers
from jzero.adapters.nnx_model import Build, NNXModel, NNXStackModel, abstract_module, builder
from jzero.adapters.stacked_model import MethodsModel, StackedModel
from jzero.adapters.torch_habits import check_no_torch_module
from jzero.errors import ConfigError, in_a_line
from jzero.model import Model
from jzero.tree import PyTree


def from_flax(
    module: Any, loss_fn: Callable | None = None, *, criterion: Callable | None = None, stack: str | None = None,
    has_aux: bool = False, sync_batch_norm: bool = True, example_batch: PyTree = None, example_extra: PyTree = None,
) -> Model:  # fmt: skip
    """Turn a Flax module into a model.

    Only parameters are trained. Other nnx.Variables, and Linen collections that training changes, are state: every
    micro-batch replaces it, and evaluation reads it (BatchNorm's running statistics). Other arrays of a module (a mask,
    rotary tables; in Linen, collections that training only reads) are constants, with their values under `nnx.Rngs(0)`
    or `jax.random.key(0)`. Random state is drawn again in every step. Dropout that the constructor switched off stays
    off in training.

    Args:
      module: a function `rngs -> nnx.Module` (a class that takes `rngs` will do), a built nnx.Module, whose values
        training starts from, or a Linen module.
      loss_fn: `loss_fn(module, batch)` -> a scalar, or `jzero.Mean(sum, count)` for a weighted mean. `module` is the
        NNX module or the bound Linen module. A third positional parameter, or one named `rng`, gets the step's key, or
        None in evaluation. A parameter named `extra` gets what is passed to the step besides the batch, or None. An NNX
        module with a layer stack needs no loss_fn: it has `prefix(batch) -> x`, `stack` (one block whose parameters
        were stacked by `nnx.vmap`; `stack(x)` is one layer) and `suffix(x, batch) -> loss`.
      criterion: instead of loss_fn: `criterion(outputs, labels)` -> what loss_fn returns. Then batches are
        (inputs, labels), and the outputs are `module(inputs)`, or what a layer stack's `suffix(x, inputs)` returns. A
        module whose call takes `train`, `training`, `is_training` or `deterministic` is told whether it trains.
      stack: the path of equal layers in the module: "layers" or "encoder.layers". They become a layer stack, which
        ZeRO-3 gathers layer by layer and a pipeline cuts into stages. For NNX an nnx.List, an nnx.Sequential, numbered
        attributes, or a module that nnx.vmap stacked; for Linen layers_0, layers_1, ..., or a module of nn.scan. What
        comes before and after the layers is found by running the loss without them; if that fails, the error shows the
        methods to write.
      has_aux: the loss function (or `suffix`, or the criterion) returns (loss, {name: metric}), each metric a scalar or
        a `Mean`.
      sync_batch_norm: BatchNorm normalises a training batch by the statistics of all replicas' micro-batches together,
        as torch's SyncBatchNorm; False: each replica's by its own, and the running statistics are averaged.
      example_batch: a batch, or its ShapeDtypeStructs. Linen needs it, because parameters take their shapes from an
        input; and `mesh.tensor` without a table of dimensions, which is then found by trying.
      example_extra: for a Linen module whose loss_fn reads `extra`: what is passed to the step, or its shapes.

    Raises:
      ConfigError: `loss_fn` or `example_batch` is missing, or fits no module of this kind.

    >>> import jax
    >>> model = from_flax(lambda rngs: nnx.Linear(3, 1, rngs=rngs), lambda m, b: (m(b["x"]) ** 2).mean())
    >>> jax.tree.map(jax.numpy.shape, model.init(jax.random.key(0)))
    {'bias': (1,), 'kernel': (3, 1)}
    """
    if example_extra is not None and (criterion is not None or not isinstance(module, linen.Module)):
        raise ConfigError("from_flax: example_extra is for a Linen module with loss_fn; leave it out")
    check_no_torch_module("model", module, "write it in Flax; nnx.Module has nearly the same layers")
    if criterion is None:
        model = _model(module, loss_fn, stack, has_aux, sync_batch_norm, example_batch, example_extra)
    elif loss_fn is not None:
        raise ConfigError("from_flax: loss_fn and criterion are both given: leave one of them out")
    else:
        example = None if example_batch is None else inputs_and_labels(example_batch)[0]
        net = _model(module, outputs_of, stack, False, sync_batch_norm, example)
        model = add_criterion(net, criterion, has_aux)
    if example_batch is not None:
        model.example_batch = jax.eval_shape(lambda x: x, example_batch)
    return model


def _model(
    module: Any, loss_fn: Callable | None, stack: str | None, has_aux: bool, sync_batch_norm: bool,
    example_batch: PyTree = None, example_extra: PyTree = None,
) -> FlaxModel:  # fmt: skip
    if isinstance(module, linen.Module):
        if loss_fn is None or example_batch is None:
            raise ConfigError("from_flax: a Linen module needs loss_fn(module, batch) or criterion, and example_batch")
        plain = _linen_model(module, loss_fn, example_batch, has_aux, sync_batch_norm, example_extra)
        return plain if stack is None else StackedModel(plain, LinenLayers(plain, stack))
    if isinstance(module, nnx.Module):
        built = nnx.clone(module)
        built.train()  # it may have been evaluated before
        model = _nnx_model(builder(lambda rngs: nnx.clone(built)), loss_fn, stack, has_aux, sync_batch_norm)
        model.values = model.adopt(module)
        return model
    if not callable(module):
        raise ConfigError(f"from_flax: {module!r} is neither an nnx or Linen module nor a function rngs -> nnx.Module")
    return _nnx_model(builder(module), loss_fn, stack, has_aux, sync_batch_norm)


def _linen_model(module: linen.Module, loss_fn: Callable, example_batch: PyTree, *settings: PyTree) -> LinenModel:
    try:
        return LinenModel(module, with_rng(loss_fn), example_batch, *settings)
    except (TypeError, AttributeError) as error:  # of extra["..."] and extra.x
        if "NoneType" in str(error) and "extra" in inspect.signature(loss_fn).parameters and settings[-1] is None:
            raise ConfigError(
                f"from_flax: loss_fn failed without its extra ({in_a_line(error)}): pass example_extra, what the step "
                "will get as extra, or its shapes"
            ) from error
        raise


def _nnx_model(
    build: Build, loss_fn: Callable | None, stack: str | None, has_aux: bool, sync_batch_norm: bool
) -> FlaxModel:
    """Make the model that suits the methods of the module, and the path of its layers if there is one."""
    layers = None if stack is None else NNXLayers(build, stack)
    abstract = layers.abstract if layers else abstract_module(build)
    parts = ("prefix", "suffix") if layers else ("prefix", "stack", "suffix")
    if methods := all(hasattr(abstract, name) for name in parts):
        if not layers and isinstance(abstract.stack, LISTS):
            raise ConfigError('from_flax: a module with prefix, suffix has its layers in "stack": pass stack="stack"')
        if loss_fn not in (None, outputs_of):
            raise ConfigError(f"from_flax: a module with {', '.join(parts)} has its loss in suffix; drop loss_fn")
        has_aux = has_aux or getattr(abstract, "has_aux", False)
        if not layers:
            return NNXStackModel(build, abstract, has_aux, sync_batch_norm)
    elif loss_fn is None:
        missing = "from_flax: loss_fn(module, batch) is missing, or criterion; only prefix, stack, suffix need none"
        raise ConfigError(layers.advice("there is no loss_fn") if layers else missing)
    build = layers.build if layers else build
    plain = NNXModel(build, abstract, with_rng(loss_fn or outputs_of), has_aux, sync_batch_norm)
    return (MethodsModel if methods else StackedModel)(plain, layers) if layers else plain


def with_criterion(model: Any, criterion: Callable) -> Model:
    """Join a Flax module and a criterion, as `initialize` gets them.

    Raises:
      ConfigError: the model has a loss already, or needs more than the two.
    """
    if isinstance(model, linen.Module):
        raise ConfigError(
            "criterion: a Linen module needs an example too: pass model=jzero.from_flax(module, criterion=criterion, "
            "example_batch=(inputs, labels)), and leave criterion out here"
        )
    if not isinstance(model, type) and hasattr(model, "loss"):
        raise ConfigError(
            f"criterion: {model!r} has a loss already, with which engine(batch) returns the loss: leave out criterion, "
            "or pass the Flax module itself as model"
        )
    return from_flax(model, criterion=criterion)
