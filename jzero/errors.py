"""The exceptions: a user's mistake, and a checkpoint that cannot be written or read."""


class ConfigError(ValueError):
    """A config, model or call that jzero cannot honour.

    Each problem names the key, its value, what is allowed and the fix; all problems of a config are
    reported together.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems) if len(problems) == 1 else "\n".join(f"- {p}" for p in problems))


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, is incomplete, or does not hold what was saved."""
