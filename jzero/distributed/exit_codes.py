"""Exit codes with a meaning of their own, for processes, the launcher and the system that started it."""

SAVED = 75  # all processes saved a checkpoint after SIGTERM; start the job again: EX_TEMPFAIL of sysexits.h
HUNG = 124  # no step finished for --hang_timeout seconds: the exit code of timeout(1)
