"""What a pipeline stage carries from tick to tick."""

from __future__ import annotations

from typing import Any, NamedTuple

from jzero.loss import Sums


class Carry(NamedTuple):
    """The values that a stage carries from tick to tick; M micro-batches.

    Attributes:
      entering: the prefix's output, for the first stage's next forward pass.
      inbox: the output of the stage before.
      returned: the gradient from the stage after.
      leaving: the gradient of this stage's last input.
      stash: residuals between F and B or W, [slots * pieces, ...] each.
      outputs: gpipe's of the chunks, whose suffix runs long after F, [slots, ...] each.
      rest: operands of the weights' gradient between D and W, [slots * pieces, ...] each.
      gradients: summed so far.
      state: the model's, None in the place of parameters.
      former: the ends' state before every micro-batch, [M, ...] each, if the prefix's output depends on it.
      seen: the loss and metrics of every micro-batch, [M, 2] each.
    """

    entering: Any
    inbox: Any
    returned: Any
    leaving: Any
    stash: Any
    outputs: Any
    rest: Any
    gradients: Any
    state: Any
    former: Any
    seen: Sums
