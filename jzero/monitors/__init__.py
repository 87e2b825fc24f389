"""Monitors: the curves of a run in files and services, with DeepSpeed's sections, event names and file layout."""

from jzero.monitors.curves import Curves as Curves
