"""Whole runs by one command: `jzero demo`, `jzero finetune`, `jzero recipes`."""
