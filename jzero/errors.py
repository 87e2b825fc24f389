"""The one exception a user's mistake raises."""


class ConfigError(ValueError):
    """A config, model or call that jzero cannot honour.

    Each problem names the key, its value, what is allowed and the fix; all problems of a config are
    reported together.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems) if len(problems) == 1 else "\n".join(f"- {p}" for p in problems))
