"""The fields of the sections `fp16`, `bf16` and `fp8`."""

from typing import Annotated, Literal, get_args

from jzero.config.fields import Count, Flag, Patterns, PositiveInt32, Section
from jzero.values import kinds
from jzero.values.kinds import Kind, number, one_of

FP8Format = Literal["hybrid", "e4m3"]
FP8Recipe = Literal["current", "delayed"]

_RECIPE = one_of(get_args(FP8Recipe))


def _recipe(value: object) -> str:
    if isinstance(value, str) and value.lower().startswith(("mx", "nv")):
        raise ValueError("scales of blocks (MXFP8, NVFP4) need Blackwell GPUs, and are not supported")
    return _RECIPE.parse(value)


class FP16Config(Section):
    """float16 compute with loss scaling; `loss_scale` 0 is dynamic, any other value static.

    `fp16_master_weights_and_grads` keeps no float32 masters: the optimizer updates float16 parameters, from gradients
    in `data_types.grad_accum_dtype`. `auto_cast` casts the floating-point arrays of the batch to float16.
    """

    enabled: Flag = False
    loss_scale: Annotated[float, kinds.NON_NEGATIVE32] = 0.0
    initial_scale_power: Annotated[int, number(0, most=127, whole=True)] = 16
    loss_scale_window: PositiveInt32 = 1000
    hysteresis: PositiveInt32 = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Annotated[float, number(above=0, float32=True)] = 1.0
    fp16_master_weights_and_grads: Flag = False
    auto_cast: Flag = False


class BF16Config(Section):
    """bfloat16 compute.

    `bf16_master_weights_and_grads` keeps no float32 masters: the optimizer updates bfloat16 parameters, from gradients
    in `data_types.grad_accum_dtype`. `bf16_optimizer_states` keeps its moments in bfloat16 too.

    `auto_cast` casts the floating-point arrays of the batch to bfloat16: all (true), none (false), or "auto": those
    that the model only multiplies with its bfloat16 weights, so that targets, masks and time steps keep their digits.
    """

    enabled: Flag = False
    check_grad_overflow: Flag = True
    bf16_master_weights_and_grads: Flag = False
    bf16_optimizer_states: Flag = False
    auto_cast: Annotated[bool | Literal["auto"], kinds.FLAG_OR_AUTO] = "auto"


class FP8Config(Section):
    """Matmuls with the weights of the layer stack in fp8; needs `bf16`, and Hopper or Ada GPUs or newer.

    `recipe` "current": each array is scaled by its own largest element; "delayed": activations and gradients by the
    largest of the last `amax_history_len` steps, which is faster. `format` is the dtype of gradients: "hybrid" e5m2,
    "e4m3" as weights and activations have. A weight stays in bfloat16 if it is used for more than matmuls, if
    it has less than `min_size` inputs or outputs, or if a regular expression of `exclude` matches its name.
    """

    enabled: Flag = False
    recipe: Annotated[FP8Recipe, Kind(_RECIPE.allowed, _recipe)] = "current"
    amax_history_len: PositiveInt32 = 1024
    format: Annotated[FP8Format, one_of(get_args(FP8Format))] = "hybrid"
    exclude: Patterns = ()
    min_size: Count = 1024
