"""The speed of a planned step, and what a number of tokens takes in days, GPU-hours, energy and money."""

from __future__ import annotations

from dataclasses import dataclass

from jzero.batch import Amount
from jzero.errors import ConfigError
from jzero.planner.gpus import GPU
from jzero.planner.step_time import StepTime

ASSUMED = 0.10  # the relative error to expect where a rate is assumed


@dataclass(frozen=True)
class Budget:
    """What training on a number of tokens takes; `cost` is in the unit of the price, None without one.

    `kwh` takes the cards' power limit all the time, and nothing for hosts, network and cooling.
    """

    tokens: float
    steps: int
    days: float
    gpu_hours: float
    kwh: float
    cost: float | None = None


@dataclass(frozen=True)
class PlannedTime:
    """The estimated time of a step.

    Attributes:
      step: where the time goes, see `step_time`.
      amount: samples and tokens of a global batch.
      useful_flops: of one GPU, see `useful_flops`; None if nothing tells.
      gpu, gpus, nodes: the kind, and the numbers of GPUs and of hosts.
      half: whether the products run in 16 bits.
      origin: of the rates that the estimate takes, "measured: ..." or "data sheet: ...".
    """

    step: StepTime
    amount: Amount
    useful_flops: float | None
    gpu: GPU
    gpus: int
    nodes: int
    half: bool
    origin: str

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.step.step_s

    @property
    def uncertainty(self) -> float:
        """The relative error to expect: 0.04 is 4 % either way. The rate of the links between hosts is assumed."""
        return max(self.step.uncertainty, ASSUMED if self.nodes > 1 else 0.0)

    @property
    def samples_per_s(self) -> float:
        return self.amount.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.amount.tokens is None else self.amount.tokens / self.step_s

    @property
    def tokens_per_s_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.gpus

    @property
    def mfu(self) -> float | None:
        """The share of the data sheet's FLOP/s that useful products reach, from 0 to 1."""
        return self.useful_flops and self.useful_flops / self.step_s / (1e12 * self.gpu.tflops[not self.half])

    def budget(self, tokens: float, price: float | None = None) -> Budget:
        """Compute what training on `tokens` takes.

        Args:
          price: of one GPU for one hour.

        Raises:
          ConfigError: the batch has no tokens that are known, or a number that is not positive.
        """
        if self.amount.tokens is None:
            raise ConfigError("tokens: the batch has none that the plan knows (integers of inputs [rows, length])")
        if not tokens > 0 or (price is not None and not price >= 0):
            raise ConfigError(f"tokens = {tokens}, price = {price}: must be positive numbers")
        steps = -(-tokens // self.amount.tokens)
        hours = steps * self.step_s / 3600
        used = hours * self.gpus
        return Budget(
            tokens, int(steps), hours / 24, used, used * self.gpu.watts / 1000, None if price is None else used * price
        )
