"""Arithmetic: the three batch sizes for a number of replicas, the degrees of the mesh axes for a number of devices."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jzero.config.sections import Settings
from jzero.errors import ConfigError
from jzero.values.kinds import either

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TRAIN, MICRO, ACCUM = BATCH
MICS = "zero_optimization.mics_shard_size"


def _divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


# ---- batch sizes --------------------------------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """train = micro × accum × replicas; `inferred` lists, as text, the sizes that the config does not give."""

    train: int
    micro: int
    accum: int
    inferred: str


def batch(
    s: Settings, replicas: int, former: Mapping[str, Any] | None = None, autos: Collection[str] = ()
) -> BatchSizes:
    """Resolve the batch sizes, see `Config.batch`.

    Any two sizes determine the third; one alone means one accumulation step. Integer divisions below may leave a
    remainder, which the last check reports.
    """
    if replicas < 1:
        raise ConfigError(f"replicas = {replicas}: must be a positive integer (the mesh's data × zero × expert)")
    if former and (sizes := keep_global_batch(s, replicas, former, autos)):
        return sizes
    train, micro, accum = s.train_batch_size, s.train_micro_batch_size_per_gpu, s.gradient_accumulation_steps
    if accum is None:
        accum = train // micro // replicas if train and micro else 1
    if micro is None and train is not None:
        micro = train // replicas // accum
    if micro is None:
        alone = f"; {ACCUM} = {accum} alone does not set one" if s.gradient_accumulation_steps else ""
        raise ConfigError(
            f"no batch size: give {TRAIN} or {MICRO} (a positive integer){alone};"
            f" {TRAIN} = {MICRO} × {ACCUM} × {replicas} replicas"
        )
    if train is None:
        train = micro * accum * replicas
    if train != micro * accum * replicas:
        raise ConfigError(_unequal(s, train, micro, accum, replicas))
    return _sizes(s, train, micro, accum)


def _sizes(s: Settings, train: int, micro: int, accum: int, autos: Collection[str] = ()) -> BatchSizes:
    rows = zip(BATCH, given(s), (train, micro, accum), strict=True)
    changed = {key: (None if key in autos else own, size) for key, own, size in rows if own != size}
    inferred = ", ".join(f"{key} = {size}{instead(own, size)}" for key, (own, size) in changed.items())
    return BatchSizes(train, micro, accum, inferred)


def instead(own: int | None, size: int) -> str:
    """Word that a size is not the one that the config gives; "" if it is, or the config gives none."""
    return "" if own in (None, size) else f" instead of the config's {own}"


def given(s: Settings) -> list[int | None]:
    """Return the three sizes as the config gives them, None where it does not."""
    return [getattr(s, key) for key in BATCH]


def keep_global_batch(
    s: Settings, replicas: int, former: Mapping[str, Any], autos: Collection[str]
) -> BatchSizes | None:
    """Keep the global batch of the run that resumes, by accumulation; None if the config's own sizes count.

    Learning rate and schedule were tuned for that global batch, and more or fewer replicas are no reason to change it.
    A config that the user has edited is. A micro-batch that the config leaves open ("auto", too) becomes the
    checkpoint's, unless the config gives an accumulation that divides the batch.
    """
    train, own, micro, accum = former["train"], *given(s)
    if own not in (None, train) or not (own or micro):
        return None
    then, auto = former.get("given"), MICRO in autos
    edited = accum not in (None, then and then[2]) if auto else then != given(s)
    if edited and (own or former["replicas"] == replicas):
        return None
    if (auto or not micro) and accum and train % (accum * replicas) == 0:
        micro = train // (accum * replicas)
    else:
        micro = math.gcd(former["micro"], train // replicas) if auto else micro or former["micro"]
    if train % (micro * replicas) == 0:
        return _sizes(s, train, micro, train // (micro * replicas), autos)
    if own:
        return None
    raise ConfigError(
        f"the checkpoint's train_batch_size = {train}: must be a multiple of {micro * replicas} (micro-batch x "
        f"replicas); or give {TRAIN} in the config"
    )


def _unequal(s: Settings, train: int, micro: int, accum: int, replicas: int) -> str:
    """Word the equation that fails, with the nearest values that solve it for each size the config gives."""
    own_micro, own_accum = s.train_micro_batch_size_per_gpu, s.gradient_accumulation_steps
    unit = (own_micro or 1) * (own_accum or 1) * replicas
    # A size that is not given can be any divisor, so every multiple of `unit` is a valid global batch; with both given
    # only `unit` itself is.
    free = not (own_micro and own_accum)
    totals = [k * unit for k in (train // unit, train // unit + 1) if k] if free else [unit]
    fixes = [f"{TRAIN} = {_around(train, totals)}"]
    for key, own, other in ((MICRO, own_micro, own_accum), (ACCUM, own_accum, own_micro)):
        fits, remainder = divmod(train, replicas * (other or 1))
        if own and not remainder:
            fixes.append(f"{key} = {_around(own, _divisors(fits) if free else [fits])}")
    nearest = f"nearest valid: {', or '.join(fixes)}"
    if 0 in (micro, accum):  # inferred: no micro-batch is that small
        sizes = [f"{key} {size}" for key, size in ((MICRO, own_micro), (ACCUM, own_accum)) if size]
        product = " × ".join([*sizes, f"{replicas} replicas"])
        return f"{TRAIN} = {train}: must be at least {unit} ({product}), and a multiple of it; {nearest}"
    inferred = {key: " (inferred)" if getattr(s, key) is None else "" for key in BATCH}
    return (
        f"{TRAIN} = {train}: must equal {MICRO} {micro}{inferred[MICRO]} × {ACCUM} {accum}{inferred[ACCUM]}"
        f" × {replicas} replicas = {micro * accum * replicas}; {nearest}"
    )


def _around(target: int, choices: list[int]) -> str:
    """Join the nearest choices on either side of the target as text."""
    below, above = [c for c in choices if c <= target], [c for c in choices if c > target]
    return either(below[-1:] + above[:1])


# ---- mesh degrees -------------------------------------------------------------------------------------------------


def group_degrees(s: Settings) -> dict[str, tuple[str, int]]:
    """Return DeepSpeed's key that sets the degree of an axis, and the degree; 0 where the mesh section sets it."""
    tensor, experts = s.tensor_parallel, s.expert_parallel
    keys = {
        "pipe": {"pipeline.stages": s.pipeline.stages or 0},
        "zero": {MICS: s.zero_optimization.mics_shard_size},
        "expert": {"expert_parallel.autoep_size": experts.autoep_size if experts.enabled else 0},
        "context": {"sequence_parallel_size": s.sequence_parallel_size},
        "tensor": {"tensor_parallel.autotp_size": tensor.autotp_size, "tensor_parallel.tp.tp_size": tensor.tp.tp_size},
    }
    least = {"pipe": 1, "zero": 1}  # a degree of 1 is the default of the others
    return {
        axis: next(((k, size) for k, size in sizes.items() if size >= least.get(axis, 2)), (f"mesh.{axis}", 0))
        for axis, sizes in keys.items()
    }


def asked_degrees(s: Settings) -> dict[str, int]:
    """Return the requested degrees; `checks` allows -1, all remaining devices, on one axis at most."""
    groups = {axis: size for axis, (_, size) in group_degrees(s).items() if size}
    degrees = s.mesh.model_dump() | groups
    if "zero" in groups and "data" not in s.mesh.model_fields_set and -1 not in degrees.values():
        degrees["data"] = -1  # the groups are replicas of each other
    return degrees


def mesh_degrees(s: Settings, num_devices: int) -> dict[str, int]:
    """Resolve the degrees of the mesh, see `Config.mesh_degrees`."""
    if num_devices < 1:
        raise ConfigError(f"num_devices = {num_devices}: must be a positive integer")
    degrees = asked_degrees(s)
    fixed = math.prod(n for n in degrees.values() if n != -1)
    rest = [axis for axis, n in degrees.items() if n == -1]
    if num_devices % fixed if rest else num_devices != fixed:
        raise ConfigError(_misfit(s, degrees, fixed, num_devices))
    degrees |= {axis: num_devices // fixed for axis in rest}
    replicas = degrees["data"] * degrees["zero"] * degrees["expert"]
    if s.data_parallel_size not in (None, replicas):
        expert = f" × expert {degrees['expert']}" if degrees["expert"] > 1 else ""
        raise ConfigError(
            f"data_parallel_size = {s.data_parallel_size}: must be data {degrees['data']} × zero {degrees['zero']}"
            f"{expert} = {replicas} on this mesh; leave it out, or change the mesh section"
        )
    return degrees


def _misfit(s: Settings, degrees: dict[str, int], fixed: int, num_devices: int) -> str:
    """Word a product that is wrong, with the values of each axis that fit while the others stay."""
    rest = -1 in degrees.values()
    keys = {"data": "mesh.data"} | {axis: key for axis, (key, _) in group_degrees(s).items()}
    fits = []
    for axis, n in degrees.items():
        # Give no advice about an axis that the user did not ask for: a pipeline, or another axis beside a -1.
        if n == -1 or (n == 1 and (rest or axis not in ("data", "zero"))):
            continue
        others = fixed // n
        if num_devices % others == 0:
            choices = _divisors(num_devices // others) if rest else [num_devices // others]
            fits.append(f"{keys[axis]} = {either(choices)}")
    pinned = degrees["zero"] == 1 and not rest and keys["zero"] == "mesh.zero"  # the user's: the default is -1
    if pinned and num_devices % fixed:
        for axis, n in degrees.items():
            most, remainder = divmod(num_devices, fixed // n)
            if n > 1 and most > 1 and not remainder:
                fits.append(f"{keys[axis]} = {either(_divisors(most))} with mesh.zero = -1 (the rest)")
    terms = [axis for axis, n in degrees.items() if n > 1 or (axis == "zero" and pinned)] or ["data", "zero"]
    product = " × ".join(f"{keys[axis]} {degrees[axis]}" for axis in terms) + f" = {fixed} devices"
    if len(terms) == 1:
        product = f"{keys[terms[0]]} = {fixed}"
    must = f"must {'divide' if rest else 'equal'} the number of devices, {num_devices}"
    advice = "; ".join(fits) if fits else f"degrees whose product {'divides' if rest else 'is'} {num_devices}"
    if num_devices == 1:
        advice += '; to simulate 8 devices on a CPU, begin with jax.config.update("jax_num_cpu_devices", 8)'
    return f"{product}: {must}; what fits: {advice}"
