"""`jzero train.py`: run a script once per GPU on every host, and stop all processes when one dies.

`options` and `hostfile` are read into a plan (`job`); `runner` sends an `agent` to every host (`transports`, `link`),
which starts and watches the processes there.
"""
