"""The optimizers of a config, one row per name: its parameters, its constructor and its notes for the run report.

DeepSpeed's ten (names in any letter case), then those of `optax` and `optax.contrib` that are made from a learning
rate and numbers, except `REFUSED`. A name that both have is DeepSpeed's, with its defaults and arithmetic; optax's own
are `optax.lamb`, `optax.muon` and `optax.adagrad` where the numbers differ. The spellings `learning_rate`, `b1` and
`b2` are read everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import optax
import optax.contrib

from jzero.errors import ConfigError
from jzero.optimizers import muon, transforms
from jzero.optimizers.transforms import Transform, per_layer
from jzero.values.kinds import FLAG, FRACTION, INT32, NON_NEGATIVE32, TEXT, Kind, as_json, either, one_of
from jzero.values.parameters import (
    Param,
    Values,
    did_you_mean,
    fill_autos,
    is_auto,
    only,
    read_by_table,
    signature_params,
)

Make = Callable[[transforms.Knobs, Values], Transform]
Note = tuple[Callable[[Values], bool], str]


class OptimizerSection(Protocol):
    """The `optimizer` section of a config; it may also have `groups`, `no_weight_decay` and `state_dtype`."""

    @property
    def type(self) -> str: ...
    @property
    def params(self) -> Values: ...


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
      params: name of a parameter -> its default and kind.
      make: builds the transformation from the knobs and the parameters' values.
      by_group: the keys that a parameter group can set.
      notes: (test on the parameters, text) pairs; the run report prints the text where the test holds.
      check: lists the problems between its parameters.
      idle: parameters that change nothing, each with the reason.
      one_decay: whether the weight decays of all groups are one number or 0.
    """

    params: dict[str, Param]
    make: Make
    by_group: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    check: Callable[[Values], Iterator[str]] = lambda p: iter(())
    idle: Mapping[str, str] = field(default_factory=dict)
    one_decay: bool = False


def base_rate(params: Values) -> float:
    """Return the learning rate that schedules start from; Muon's is its matrices' where it has none for all."""
    return float(transforms.first(params["lr"], params.get("muon_lr"), 0.02))


def decay_key(params: Mapping[str, Any]) -> str:
    """Return the name of an optimizer's weight decay."""
    return "weight_decay_rate" if "weight_decay_rate" in params else "weight_decay"


def _two_fractions(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError
    return [FRACTION.parse(beta) for beta in value]


BETAS = Kind("two numbers in [0, 1)", _two_fractions)


def _momentum_for_nesterov(p: Values) -> Iterator[str]:
    if p["nesterov"] and not p["momentum"]:
        yield "optimizer.params.nesterov: true needs a momentum; give optimizer.params.momentum, e.g. 0.9"


_BY_GROUP = ("lr_scale", "weight_decay")
_ALL_BY_GROUP = (*_BY_GROUP, "betas")
_LR_DECAY = {"lr": Param(1e-3, NON_NEGATIVE32), "weight_decay": Param(0.0, NON_NEGATIVE32)}
_ADAM = {
    **_LR_DECAY,
    "betas": Param((0.9, 0.999), BETAS),
    "eps": Param(1e-8, NON_NEGATIVE32),
    "bias_correction": Param(True, FLAG),
    "amsgrad": only(False, 'AMSGrad with weight decay is not supported; type "amsgrad" is optax\'s, without decay'),
}
_EXACT_EPS = {"eps_inside_sqrt": only(False, "other values are not supported")}
_TORCH_ADAM = {"torch_adam": Param(False, FLAG)}
_NO_TORCH = (lambda p: p["torch_adam"], "{name}: torch_adam chooses a kernel in DeepSpeed and has no meaning here")


DEEPSPEED: dict[str, Row] = {
    "Adam": Row(
        {**_ADAM, **_TORCH_ADAM, "adam_w_mode": Param(True, FLAG)},
        transforms.adam,
        _ALL_BY_GROUP,
        (
            (
                lambda p: p["adam_w_mode"],
                "{name}: adam_w_mode is true, as in DeepSpeed: this is AdamW, with decoupled weight decay "
                "{weight_decay:g}; adam_w_mode false adds it to the gradient",
            ),
            _NO_TORCH,
        ),
    ),
    "AdamW": Row(
        {**_ADAM, **_TORCH_ADAM, "adam_w_mode": only(True, 'only type "Adam" can have false')},
        transforms.adam,
        _ALL_BY_GROUP,
        (_NO_TORCH,),
    ),
    "SGD": Row(
        {
            **_LR_DECAY,
            "momentum": Param(0.0, FRACTION),
            "nesterov": Param(False, FLAG),
            "dampening": only(0, "other values are not supported"),
        },
        transforms.sgd,
        _BY_GROUP,
        check=_momentum_for_nesterov,
    ),
    "Lamb": Row(
        {**_ADAM, **_EXACT_EPS, "min_coeff": Param(0.01, NON_NEGATIVE32), "max_coeff": Param(10.0, NON_NEGATIVE32)},
        transforms.lamb,
        _ALL_BY_GROUP,
    ),
    "Lion": Row({**_LR_DECAY, "betas": Param((0.9, 0.99), BETAS)}, transforms.lion, _ALL_BY_GROUP),
    "Adagrad": Row(
        {
            **_LR_DECAY,
            "lr": Param(1e-2, NON_NEGATIVE32),
            "eps": Param(1e-10, NON_NEGATIVE32),
            "initial_accumulator_value": Param(0.0, NON_NEGATIVE32),
        },
        transforms.adagrad,
        _BY_GROUP,
    ),
    "Muon": Row(
        {
            # Without a rate of its own, each half takes `lr`, else its default: 0.02 for Muon, 3e-4 for Adam.
            **dict.fromkeys(("lr", "muon_lr", "adam_lr"), Param(None, NON_NEGATIVE32)),
            "momentum": Param(0.95, FRACTION),
            "betas": Param((0.9, 0.95), BETAS),
            "eps": Param(1e-10, NON_NEGATIVE32),
            "weight_decay": Param(0.0, NON_NEGATIVE32),
            **_TORCH_ADAM,
            "adam_w_mode": Param(True, FLAG),
            "ns_method": Param("gram", one_of(("gram", "standard"))),
            "per_head_muon": only(False, "per-head orthogonalisation is not supported yet"),
        },
        muon.muon,
        _BY_GROUP,
        (
            (
                lambda p: p["ns_method"] == "gram",
                "{name}: ns_method gram and standard give the same values; jzero runs the standard iteration, "
                "in bfloat16 under bf16 and fp16, else in fp32",
            ),
            (
                lambda p: True,
                "{name}: Muon on the matrices inside the layer stack (in a model without one: those not named embed or "
                "lm_head), AdamW on the rest; muon_lr and adam_lr keep their ratio to lr under a schedule",
            ),
            (
                lambda p: True,
                "{name}: gradient_clipping clips the gradients; DeepSpeed's ZeRO clips the orthogonalised updates, "
                "which shortens its steps",
            ),
            _NO_TORCH,
        ),
    ),
}


def _without_compression(name: str, exact: str, params: dict[str, Param]) -> Row:
    """Make the row of a 1-bit optimizer: the exact one that it approximates, with the parameters that fall away.

    DeepSpeed removed its own (issue 8489): on NVLink the signs of momenta take longer than gradients in bfloat16.
    """
    row, why = DEEPSPEED[exact], "gradients are averaged exactly, not as signs"
    note = (lambda p: True, f"{name} is replaced by {exact}, which it approximates: {why}")
    falls_away = {**_COMMUNICATION, **params}
    params = {**row.params, **_EXACT_EPS, **falls_away}
    return replace(row, params=params, notes=(note, *row.notes), idle=dict.fromkeys(falls_away, why))


_COMMUNICATION = {
    "cuda_aware": Param(False, FLAG),
    "comm_backend_name": Param("nccl", TEXT),
    "exact_communication": Param(True, FLAG),
}
_FREEZE = {"freeze_step": Param(100_000, INT32)}
_LOCAL_STEPS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_COEFFICIENTS = ("coeff_beta", "factor_max", "factor_min", "factor_threshold")
DEEPSPEED |= {
    "OneBitAdam": _without_compression("OneBitAdam", "Adam", _FREEZE),
    "ZeroOneAdam": _without_compression("ZeroOneAdam", "Adam", dict.fromkeys(_LOCAL_STEPS, Param(1, INT32))),
    "OneBitLamb": _without_compression(
        "OneBitLamb", "Lamb", {**_FREEZE, **dict.fromkeys(_COEFFICIENTS, Param(0.0, NON_NEGATIVE32))}
    ),
}

# optax's, by its names. In these, the update of an element depends on that element alone, or on all parameters at once,
# so a layer stack changes nothing.
OPTAX_ELEMENTWISE = (
    "acprop", "adabelief", "adadelta", "adamax", "adamaxw", "adan", "ademamix", "adopt", "amsgrad", "cocob",
    "dadapt_adamw", "dog", "dowg", "madgrad", "nadam", "nadamw", "noisy_sgd", "optax.adagrad", "optimistic_adam_v2",
    "optimistic_gradient_descent", "prodigy", "radam", "rmsprop", "sign_sgd", "signum", "simplified_ademamix", "yogi",
)  # fmt: skip
# In these it depends on the whole parameter, so each layer of a stack must be a parameter of its own.
OPTAX_PER_PARAMETER = ("adafactor", "fromage", "lars", "novograd", "optax.lamb", "optax.muon", "sm3")
# In these the learning rate is not a factor of the step: the state depends on it, or the step is not linear in it.
NOT_PROPORTIONAL = ("cocob", "dadapt_adamw", "fromage", "madgrad")
REFUSED = {
    "lbfgs": "its line search evaluates the loss",
    "polyak_sgd": "its update needs the loss",
    "momo": "its update needs the loss",
    "momo_adam": "its update needs the loss",
    "sophia": "its update needs the loss function",
    "optimistic_adam": "it takes no schedule; optimistic_adam_v2 does",
    "rprop": "it has step sizes of its own and takes no schedule",
    "galore": "its projection is recomputed in every step when mapped over layers",
    "dpsgd": "it needs the gradient of every example",
    "schedule_free_adamw": "evaluation needs other parameters than training",
    "schedule_free_sgd": "evaluation needs other parameters than training",
    "muadam": 'write type "Adam" with the groups of jzero.mup_groups',
    "muadamw": 'write type "AdamW" with the groups of jzero.mup_groups',
    "musgd": "no μP for SGD",
}


def _alias(name: str) -> Row:
    """Make the row of an optax function: its own parameter names, the learning rate also as `lr`."""
    own_name = name.removeprefix("optax.")
    function = getattr(optax, own_name, None) or getattr(optax.contrib, own_name)
    # JSON has no functions or arrays
    not_from_json = ("mask", "weight_decay_mask", "trust_ratio_mask", "key", "clip_value_fn")
    signature = signature_params(function)
    own_lr = signature.pop("learning_rate").default
    params = {key: param for key, param in signature.items() if key not in not_from_json}
    decay = decay_key(params)
    mask = next((key for key in ("mask", "weight_decay_mask") if key in signature), None)

    def make(k: transforms.Knobs, p: Values) -> Transform:
        arguments = {key: value for key, value in p.items() if key != "lr"}
        if mask and (decays := [own["weight_decay"] for own in k.own.values() if "weight_decay" in own]):
            arguments[decay] = max(p[decay] or 0.0, *decays)  # of all groups one number or 0
            arguments[mask] = lambda tree: jax.tree.map(bool, k.per_leaf("weight_decay", p[decay] or 0.0, tree))
        try:
            if name == "sm3":  # takes a constant rate only, and needs no other: its update is linear in the rate
                tx = optax.chain(function(learning_rate=1.0, **arguments), optax.scale_by_schedule(k.lr))
            else:
                tx = function(learning_rate=k.lr, **arguments)
        except (TypeError, ValueError, ArithmeticError) as error:  # radam divides by 1 - b2
            raise ConfigError(f"optimizer.params: {name} refuses {arguments!r}: {error}") from error
        return per_layer(tx, k.stacked) if name in OPTAX_PER_PARAMETER else tx

    lr = Param(own_lr if isinstance(own_lr, int | float) else 1e-3, NON_NEGATIVE32)
    by_group = ["lr_scale"] * (name not in NOT_PROPORTIONAL)
    # optax.muon has a second decay, without a mask, for the parameters that are no matrices
    by_group += ["weight_decay"] * (mask is not None and name != "optax.muon")
    return Row({"lr": lr, **params}, make, tuple(by_group), one_decay=True)


def look_up(optimizer_config: OptimizerSection) -> tuple[Row | None, dict[str, Any], list[str]]:
    """Find the row of a config's optimizer.

    Returns:
      The row (None for an unknown type), the parameters with the row's defaults filled in, and every problem.
    """
    name = str(optimizer_config.type).lower()
    is_optax = name in (*OPTAX_ELEMENTWISE, *OPTAX_PER_PARAMETER)
    row = _alias(name) if is_optax else {n.lower(): row for n, row in DEEPSPEED.items()}.get(name)
    if row is None:
        return None, {}, [_no_such(str(optimizer_config.type))]
    given, twice = _in_our_names(optimizer_config.params or {}, row.params)
    outside = [key for key in ("state_dtype", "groups") if key in given and key not in row.params]
    twice += [f'optimizer.params.{key}: {given.pop(key)!r} belongs to "optimizer", next to "params"' for key in outside]
    values, problems = read_by_table("optimizer.params", fill_autos(given, row.params), row.params)
    return row, values, [*twice, *(problems or row.check(values))]


def _in_our_names(given: Values, table: Mapping[str, Param]) -> tuple[dict[str, Any], list[str]]:
    """Rename optax's `learning_rate` to `lr`, and `b1` and `b2` to `betas` where the table has that.

    Returns:
      The renamed parameters, and a problem for each one given under both names.
    """
    ours, problems = dict(given), []

    def rename(theirs: str, name: str, value: Any) -> None:
        if name in given:
            problems.append(
                f"optimizer.params.{theirs}: {name} {given[name]!r} is given too; they are one parameter, keep one"
            )
        ours[name] = given.get(name, value)

    if "learning_rate" in given:
        rename("learning_rate", "lr", ours.pop("learning_rate"))
    if "betas" in table:
        found = {key: ours.pop(key) for key in ("b1", "b2") if key in given}
        if found := {key: value for key, value in found.items() if not is_auto(value)}:
            b1, b2 = table["betas"].default
            rename(" and ".join(found), "betas", [found.get("b1", b1), found.get("b2", b2)])
    return ours, problems


# DeepSpeed's classes for state in host memory, and the type of each.
_ON_HOST = {f"deepspeedcpu{name}".lower(): name for name in ("Adam", "Adagrad", "Lion")}


def _no_such(name: str) -> str:
    names = [*DEEPSPEED, *OPTAX_ELEMENTWISE, *OPTAX_PER_PARAMETER]
    use = f"Use {either(DEEPSPEED)}, or one of optax's (docs/configuration.md lists them)"
    if is_auto(name):
        return (
            'optimizer.type = "auto": "auto" is the Hugging Face Trainer\'s default of a parameter, and a type has '
            'none; write "type": "AdamW", the Trainer\'s optimizer, whose params may be "auto"'
        )
    if own := _ON_HOST.get(name.lower()):
        return (
            f'optimizer.type: {name!r} is DeepSpeed\'s class for state in host memory; write "type": {as_json(own)} '
            'and zero_optimization.offload_optimizer: {"device": "cpu"}'
        )
    if name.lower() in REFUSED:
        return f"optimizer.type: {name!r} is not supported: {REFUSED[name.lower()]}. {use}"
    return (
        f"optimizer.type: {name!r} is unknown{did_you_mean(name, names)} {use}; any other optax optimizer can be "
        "passed as optimizer=..."
    )
