"""`jzero train.py`: run a script once per GPU on every host, and stop all processes when one dies.

`options` and `hostfile` are read into a plan (`job`). A `runner` sends an `agent` to every host (`transports`, `link`,
`connecting`), which starts and watches the processes there. Its messages drive an `attempt`, a state machine that knows
who failed first and why (`failure`); `restarts` decides whether another attempt follows.
"""
