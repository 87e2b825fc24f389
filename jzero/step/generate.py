"""Text generation under the training layout: greedy or sampled, with a key-value cache.

One compiled program reads the prompts in one pass and adds a token to every row in each further pass. ZeRO-3 gathers
layer by layer in every pass. In a pipeline every stage keeps the cache of its own layers, and `tensor` divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jzero.distributed.host_collectives import Guard
from jzero.errors import ConfigError
from jzero.mesh import BATCH_AXES, PIPE, batch_spec, present, replicas
from jzero.model import ENDS, STACK, StackModel, replace_state
from jzero.passes.stack import fetch_params
from jzero.pipeline import vocab_parallel
from jzero.pipeline.stages import divided_vocabulary
from jzero.spread.spread_model import SpreadModel, on_group
from jzero.step.batch import host_arrays, place_batch
from jzero.step.cached_stack import Make, cached_layer, through_layers, through_stages
from jzero.step.call import Call
from jzero.step.evaluate import pad_rows, to_numpy
from jzero.step.setup import Setup
from jzero.step.state import TrainState, check_alive, check_key
from jzero.tree import PyTree

Forward = Callable[..., tuple[jax.Array, PyTree]]  # (tokens [B, S], column, padding, cache) -> (logits [B, V], cache)


class Sampling(NamedTuple):
    """The choice of a token; all are arrays or None, so that another value needs no other program.

    Attributes:
      rng: None: greedy.
      temperature, top_k, top_p: see `Generator.__call__`.
      eos: [n], the tokens that end a row.
      pad: follows them.
    """

    rng: jax.Array | None = None
    temperature: ArrayLike | None = None  # with a key there is one
    top_k: ArrayLike | None = None
    top_p: ArrayLike | None = None
    eos: jax.Array | None = None
    pad: ArrayLike = 0


class Generator:
    """Continues prompts with the parameters of a train state; `TrainStep.generate` is one."""

    def __init__(self, setup: Setup, guard: Guard):
        self.setup, self.guard = setup, guard

    def __repr__(self) -> str:
        return f"Generator({self.setup.model!r})"

    def __call__(
        self, state: TrainState, tokens: ArrayLike, max_new_tokens: int, *, attention_mask: ArrayLike | None = None,
        rng: jax.Array | None = None, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None, pad_token_id: int | None = None, numpy: bool = False,
    ) -> jax.Array | np.ndarray:  # fmt: skip
        """Continue every row of tokens.

        Args:
          state: a TrainState; `step.averaged(state)` generates with the moving average of the parameters.
          tokens: the prompts [rows, S], any number of rows; with several processes, each passes all of them.
          max_new_tokens: appended to every row. Another number compiles another program, as another shape does.
          attention_mask: [rows, S], 0 for padding, as from a tokenizer with padding_side="left"; default: no padding.
          rng: the key to sample with; None: the most probable token (greedy). With the same key, a row gets the same
            tokens on every mesh and at every stage, up to rounding.
          temperature: divides the logits; 0 is greedy.
          top_k: sample from the k most probable tokens.
          top_p: sample from the fewest most probable tokens whose probabilities (after top_k) sum to top_p.
          eos_token_id: a token that ends its row, or several of them.
          pad_token_id: fills a row that has ended; default: eos_token_id, or the first of them.
          numpy: return a NumPy array with all rows, on every process.

        Returns:
          The prompts and their continuations, [rows, S + max_new_tokens] int32.

        Raises:
          ConfigError: a model without a cache, bad arguments.
        """
        check_alive(state)
        model = self.setup.model
        if not hasattr(model, "make_cache"):
            raise ConfigError(
                f"generate: {model!r} has no cache: give the module make_cache, decode_prefix, stack.decode and "
                "decode_suffix (without a layer stack: make_cache and decode), see jzero/model.py"
            )
        prompts, padding = _prompts(tokens, attention_mask, getattr(model, "vocab_size", None))
        sampling = _sampling(max_new_tokens, rng, temperature, top_k, top_p, eos_token_id, pad_token_id)
        rows, sharding = len(prompts), NamedSharding(self.setup.mesh, batch_spec(self.setup.mesh))
        placed = jax.tree.map(partial(pad_rows, rows=-rows % replicas(self.setup.mesh)), (prompts, padding))
        placed = place_batch(placed, sharding, len(placed[0]))
        operands = state.params, placed, sampling._replace(rng=None), np.int32(rows), sampling.rng
        found = self._run(*operands, of=f" of {max_new_tokens} new tokens", new=int(max_new_tokens))
        if numpy:
            found = to_numpy(found, self.guard.shared)
        return found[:rows] if len(found) > rows else found

    @cached_property
    def _run(self) -> Call:
        setup, rows = self.setup, batch_spec(self.setup.mesh)

        def run(
            params: PyTree, prompts: PyTree, sampling: Sampling, count: jax.Array, rng: jax.Array | None, *, new: int
        ) -> jax.Array:
            whole = PartitionSpec()
            mapped = setup.manual(partial(_generate, setup, new=new), rows, whole, whole, out_specs=rows)
            return mapped(params, *prompts, count, sampling._replace(rng=rng))

        return Call("the continuations", setup.jit(run, static_argnames="new"), self.guard)


# ------------------------------------------------------------------ arguments


def _prompts(tokens: PyTree, mask: PyTree, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return int32 prompts, and the number of padding columns at the left of each row; None: there are none."""
    tokens, mask = host_arrays((tokens, mask))
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        hint = "; one prompt is tokens[None]" if tokens.ndim == 1 else ""
        raise ConfigError(f"generate: tokens are {tokens.dtype}{list(tokens.shape)}: must be integers [rows, S]{hint}")
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask) != 0
    if mask.shape != tokens.shape:
        raise ConfigError(
            f"generate: attention_mask has shape {list(mask.shape)}: must be that of the tokens, {list(tokens.shape)}"
        )
    padding = (~mask).sum(1).astype(np.int32)
    wrong = np.flatnonzero(~mask[:, -1] | (mask != (np.arange(mask.shape[1]) >= padding[:, None])).any(1))
    if wrong.size:
        raise ConfigError(
            f"generate: attention_mask: row {wrong[0]} has padding after a token, but rows grow at their right end: "
            'pad on the left (tokenizer.padding_side = "left")'
        )
    if (outside := np.argwhere(mask & ((tokens < 0) | (tokens >= (vocab_size or 2**31))))).size:
        row, column = outside[0]
        token = f"a token below the vocabulary's {vocab_size}" if vocab_size else "a token"
        raise ConfigError(
            f"generate: tokens[{row}, {column}] = {tokens[row, column]}: must be {token}, or 0 in attention_mask"
        )
    return tokens.astype(np.int32), padding if padding.any() else None


def _sampling(new: Any, rng: Any, temperature: Any, top_k: Any, top_p: Any, eos: Any, pad: Any) -> Sampling:
    """Check the arguments of a call, and convert them."""
    new, temperature, top_k, top_p, pad = map(_number_of, (new, temperature, top_k, top_p, pad))
    eos = None if eos is None else np.atleast_1d(eos)
    ends = eos is not None and eos.ndim == 1 and eos.size and eos.dtype.kind in "iu" and (abs(eos) < 2**31).all()
    problems = [
        f"generate: {name} = {value!r}: must be {allowed}"
        for name, value, fits, allowed in (
            ("max_new_tokens", new, _is_int(new) and 0 < new < 2**31, "a positive integer"),
            ("temperature", temperature, _is_number(temperature) and temperature >= 0, "a number >= 0"),
            ("top_k", top_k, top_k is None or (_is_int(top_k) and top_k > 0), "a positive integer, or None"),
            ("top_p", top_p, top_p is None or (_is_number(top_p) and 0 < top_p <= 1), "a number > 0 and <= 1, or None"),
            ("eos_token_id", eos, eos is None or ends, "a token, a list of them, or None"),
            ("pad_token_id", pad, pad is None or (_is_int(pad) and abs(pad) < 2**31), "a token, or None"),
        )
        if not fits
    ]
    asked = {"temperature": temperature not in (0, 1), "top_k": top_k is not None, "top_p": top_p is not None}
    if rng is None and any(asked.values()):
        names = " and ".join(name for name, given in asked.items() if given)
        problems.append(
            f"generate: {names}: only used for sampling: pass a key, rng=jax.random.key(0), or leave it out"
        )
    if problems:
        raise ConfigError(*problems)
    pad = (0 if eos is None else eos[0]) if pad is None else pad
    pad, eos = np.int32(pad), None if eos is None else eos.astype(np.int32)
    if rng is None or temperature == 0:
        return Sampling(eos=eos, pad=pad)
    least = np.finfo(np.float32).tiny  # XLA takes what is smaller for zero
    top_k = None if top_k is None else np.int32(min(top_k, 2**31 - 1))
    top_p = None if top_p is None else np.float32(max(top_p, least))
    return Sampling(check_key(rng), np.float32(max(temperature, least)), top_k, top_p, eos, pad)


def _number_of(x: Any) -> Any:
    """Convert an array of one number, of any library, to the number."""
    return x.item() if getattr(x, "shape", None) == () and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and bool(np.isfinite(x))


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


# ------------------------------------------------------------------ the program


def _generate(
    setup: Setup, params: PyTree, tokens: jax.Array, padding: jax.Array | None, count: jax.Array, sampling: Sampling,
    *, new: int,
) -> jax.Array:  # fmt: skip
    """Continue this replica's rows, inside the manual region; the global rows from `count` on only fill it up."""
    (rows, length), axes = tokens.shape, present(setup.mesh, *BATCH_AXES)
    forward, cache = _forward(setup, params, rows, length + new)
    row = jnp.arange(rows) + (lax.axis_index(axes) * rows if axes else 0)

    def going(ended: jax.Array) -> jax.Array:
        """Return whether a row of any replica goes on: all replicas must run the same passes."""
        left = (~ended).sum()
        return (lax.psum(left, axes) if axes else left) > 0

    def write(t: ArrayLike, logits: jax.Array, ended: jax.Array, found: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Write the next token of every row; return (whether each row has ended, all tokens)."""
        token = jnp.where(ended, sampling.pad, sample_tokens(logits, row, t, sampling))
        if sampling.eos is not None:
            ended |= (token[:, None] == sampling.eos).any(1)
        return ended, lax.dynamic_update_index_in_dim(found, token, length + t, 1)

    def body(carry: PyTree) -> PyTree:
        t, _, ended, found, cache = carry
        last = length + t - 1  # no pass has seen this column yet
        logits, cache = forward(lax.dynamic_slice_in_dim(found, last, 1, 1), last, padding, cache)
        ended, found = write(t, logits, ended, found)
        return t + 1, going(ended), ended, found, cache

    logits, cache = forward(tokens, 0, padding, cache)
    found = jnp.concatenate([tokens, jnp.full((rows, new), sampling.pad)], axis=1)
    ended, found = write(0, logits, row >= count, found)
    start = (jnp.int32(1), going(ended), ended, found, cache)
    return lax.while_loop(lambda carry: (carry[0] < new) & carry[1], body, start)[3]


def sample_tokens(logits: jax.Array, row: jax.Array, t: ArrayLike, sampling: Sampling) -> jax.Array:
    """Choose a token for every row [B] of logits [B, V]: the draw depends on the key, the row and the step alone."""
    rng, temperature = sampling.rng, sampling.temperature
    if rng is None or temperature is None:
        return logits.argmax(-1).astype(jnp.int32)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(rng, i), t))(row)
    logits = logits.astype(jnp.float32)
    logits = logits - logits.max(-1, keepdims=True)  # a low temperature makes -inf of them, not inf
    logits = restrict(logits / temperature, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def restrict(logits: jax.Array, top_k: ArrayLike | None, top_p: ArrayLike | None) -> jax.Array:
    """Give probability 0 to all but the most probable tokens, of `top_k` and then of `top_p`.

    >>> restrict(jnp.array([1.0, 4.0, 3.0]), 2, None).tolist()
    [-inf, 4.0, 3.0]
    """
    if top_k is None and top_p is None:
        return logits
    ordered = -jnp.sort(-logits, axis=-1)
    if top_k is not None:
        ordered = jnp.where(jnp.arange(ordered.shape[-1]) < top_k, ordered, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ordered = jnp.where(before < top_p, ordered, -jnp.inf)
    least = jnp.where(ordered > -jnp.inf, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


# ------------------------------------------------------------------ forward passes with a cache


def _forward(setup: Setup, params: PyTree, rows: int, length: int) -> tuple[Forward, PyTree]:
    """Make the forward pass of this device's parameters, and an empty cache."""
    model: Any = on_group(setup.model, setup.mesh, setup.layouts)
    weights, layouts = setup.region.prepare(params, None), setup.passes.view.layouts
    diff, nondiff = weights.diff, replace_state(weights.nondiff, weights.state)

    def undivided(length: int) -> PyTree:
        return model.make_cache(rows, length, setup.precision.compute)

    token = jnp.zeros((rows, 1), jnp.int32)
    if not isinstance(setup.model, StackModel):
        decode = partial(model.decode, fetch_params(layouts, (diff, nondiff), setup.precision))
        return decode, sharded_cache(model, undivided, lambda cache: decode(token, 0, None, cache)[1], length)(length)
    # Gathered once, as in training: they stay alive through all layers anyway.
    ends = fetch_params(layouts[ENDS], (diff[ENDS], nondiff[ENDS]), setup.precision)
    through = through_stages if setup.mesh.shape[PIPE] > 1 else through_layers
    pair, layer = (diff[STACK], nondiff[STACK]), cached_layer(setup)
    vocabulary = partial(vocab_parallel.parallel, *divided_vocabulary(setup.layouts))

    def own_layers(length: int) -> tuple:
        has_own = hasattr(model, "make_prefix_cache")
        return (model.make_prefix_cache(rows, length, setup.precision.compute),) if has_own else ()

    def prefix(own: tuple, *args: PyTree) -> tuple[PyTree, tuple]:
        with vocabulary():
            found = model.decode_prefix(ends, *args, *own)
        x, *new = found if own else (found,)
        return jax.tree.map(jnp.asarray, x), tuple(new)

    first = tuple(part[0] if isinstance(part, list) else part for part in pair)
    first = jax.tree.map(lambda w: w[0], first) if setup.passes.view.layer_axis else first
    own = sharded_cache(model, own_layers, lambda own: prefix(own, token, 0, None)[1], length)(length)
    make = sharded_cache(model, undivided, lambda cache: layer(first, prefix(own, token, 0, None)[0], cache)[1], length)
    run, cache = through(setup, layer, pair, make, length)

    def forward(tokens: jax.Array, column: ArrayLike, padding: PyTree, cache: PyTree) -> tuple[jax.Array, PyTree]:
        own, cache = cache
        x, own = prefix(own, tokens, column, padding)
        x, cache = run(x, cache)
        with vocabulary():
            return model.decode_suffix(ends, x), (own, cache)

    return forward, (own, cache)


def sharded_cache(model: Any, make: Make, decode: Callable[[PyTree], PyTree], length: int) -> Make:
    """Divide the caches of `make` over `tensor` as a token's pass leaves them: by the heads that a device computes."""
    if not isinstance(model, SpreadModel):
        return make
    # On shapes alone: the layer shows how it divides keys and values.
    found = jax.eval_shape(lambda: decode(make(length)))
    return lambda length: model.divide(make(length), like=found)
