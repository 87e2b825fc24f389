"""Finds softmax cross-entropies of integer labels as optax and JAX compute them, for the kernels of `kernels.softmax`.

By XLA this loss is 40 of the 129 GiB that a step of GPT-2 124M moves, by the kernels 9. A loss is found by comparison
with the trace of the library's own function, so that nothing that differs from it is replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import optax

from jzero._compat import is_constant
from jzero.kernels.softmax import COLUMNS, row_losses
from jzero.kernels.trace import Equation, Jaxpr, Variable, users_of


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """An equation whose result is that of `form(logits, labels)`.

    Attributes:
      logits: [..., V], float32; or of 16 bits, if the program only casts them to float32.
      labels: [...] or [..., 1], as the form takes them.
    """

    form: Callable
    logits: Variable
    labels: Variable

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Compute the equation's result."""
        labels = labels.astype(jnp.int32).reshape(logits.shape[:-1])
        labels = jnp.where(labels < 0, labels + logits.shape[-1], labels)
        # Of a label that is no column both losses are NaN; the gradient is that of the normalizer alone, or none.
        losses, inside = row_losses(logits, labels), (labels >= 0) & (labels < logits.shape[-1])
        if self.form is _of_optax:
            return losses + jnp.where(inside, 0.0, jnp.nan)
        return jnp.where(inside, -losses, jnp.nan)[..., None]


def cross_entropies(jaxpr: Jaxpr) -> dict[int, CrossEntropy]:
    """Find the cross-entropies of a program, whose intermediate results nothing else uses, by their last equation."""
    made, users, found = _made(jaxpr), users_of(jaxpr), dict[int, CrossEntropy]()
    dead = {id(eqn) for eqn in jaxpr.eqns if eqn.outvars and not any(users.get(v) for v in eqn.outvars)}
    alike = defaultdict[Hashable, list[Equation]](list)
    for eqn in jaxpr.eqns:
        alike[_kind(eqn)].append(eqn)
    sought = [(form, shape) for form, name in FORMS.items() for shape in _wide_operands(jaxpr, name)]
    for (form, shape), dtype in product(sought, LABELS):
        template = _template(form, shape, dtype)
        of_template, end = _made(template), template.outvars[0]
        for eqn in alike[_kind(of_template[end])]:
            match = _Match(of_template, made)
            if not match.same(end, eqn.outvars[0]):
                continue
            inner = {v for one in match.inside.values() if one is not eqn for v in one.outvars}
            known = match.inside.keys() | dead
            if all(users[v].keys() <= known for v in inner):
                logits, labels = (match.of[v] for v in template.invars)
                others = [reader for key, reader in users[logits].items() if key not in known]
                found[id(eqn)] = CrossEntropy(form, _narrow(logits, made, others), labels)
    return found


def _of_optax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _of_log_softmax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)


# Each with the name of its equation that reads an array of the logits' shape: few others of a program do.
FORMS = {_of_optax: "exp", _of_log_softmax: "log_softmax"}
LABELS = "int32", "uint16"  # int32 holds every value of them


def _made(jaxpr: Jaxpr) -> dict[Variable, Equation]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _kind(eqn: Equation) -> Hashable:
    """Return what the last equations of a template and of its losses have in common."""
    return eqn.primitive, *(getattr(v.aval, "shape", None) for v in eqn.outvars)  # a token has no shape


def _wide_operands(jaxpr: Jaxpr, name: str) -> set[tuple[int, ...]]:
    """Return the shapes on which equations or functions of this name run, as far as the kernels take them."""
    named = [eqn for eqn in jaxpr.eqns if name == eqn.params.get("name", eqn.primitive.name)]
    return {eqn.invars[0].aval.shape for eqn in named if eqn.invars and _is_wide(eqn.invars[0].aval)}


def _is_wide(x: jax.core.ShapedArray) -> bool:
    """Return whether the kernels take logits of this shape, and save a pass: fewer columns are read at a time."""
    return x.dtype == jnp.float32 and x.ndim > 1 and x.shape[-1] >= COLUMNS and not x.shape[-1] % 8 and x.size > 0


def _template(form: Callable, shape: tuple[int, ...], dtype: str) -> Jaxpr:
    """Trace a form with labels of a dtype."""
    of_labels = shape[:-1] if form is _of_optax else (*shape[:-1], 1)
    operands = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(of_labels, jnp.dtype(dtype))
    return jax.make_jaxpr(form)(*operands).jaxpr


def _narrow(logits: Variable, made: Mapping[Variable, Equation], others: Iterable[Equation | None]) -> Variable:
    """Return what is cast to these float32 logits, unless others have a share in their gradient; else the logits."""
    # A z-loss has: its share and the loss's would both be rounded to 16 bits, and their sum again. An accuracy has not.
    shared = any(eqn is None or any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars) for eqn in others)
    eqn = made.get(logits)
    if shared or eqn is None or eqn.primitive.name != "convert_element_type":
        return logits
    return eqn.invars[0] if eqn.invars[0].aval.dtype in (jnp.bfloat16, jnp.float16) else logits


class _Match:
    """A comparison of a template with a program.

    Attributes:
      of: variable of the template -> the program's.
      inside: the program's equations, by identity, that are those of the template.
    """

    def __init__(self, template: Mapping[Variable, Equation], made: Mapping[Variable, Equation]):
        self.of: dict[Variable, Variable] = {}
        self.inside: dict[int, Equation] = {}
        self._template, self._made = template, made

    def same(self, t: Variable, v: Variable) -> bool:
        """Return whether v is computed as t is, by the same equations in the same order of operands."""
        if (t.aval.shape, t.aval.dtype) != (v.aval.shape, v.aval.dtype) or is_constant(t) != is_constant(v):
            return False
        if is_constant(t):
            return repr(t.val) == repr(v.val)
        if t in self.of or t not in self._template:
            return self.of.setdefault(t, v) is v
        a, b = self._template[t], self._made.get(v)
        if b is None or a.primitive is not b.primitive or len(b.outvars) > 1 or len(a.invars) != len(b.invars):
            return False
        # As text: functions inside are equal as programs, and the NaN of a lookup's fill value is no number.
        if not all(map(self.same, a.invars, b.invars)) or str(a.params) != str(b.params):
            return False
        self.of[t], self.inside[id(b)] = v, b
        return True
