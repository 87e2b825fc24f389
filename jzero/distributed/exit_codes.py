"""Exit codes with a meaning of their own, for processes, the launcher and the system that started it."""

UNAVAILABLE = 69  # another process was lost, or a file system failed: EX_UNAVAILABLE of sysexits.h
CONFIG = 78  # an invalid config, model or call, which another start does not change: EX_CONFIG of sysexits.h
SAVED = 75  # all processes saved a checkpoint after SIGTERM; start the job again: EX_TEMPFAIL of sysexits.h
HUNG = 124  # no step finished for --hang_timeout seconds: the exit code of timeout(1)
