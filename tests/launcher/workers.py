"""A script for the tests of jobs, whose argument names what it does in words, and what programs of others print."""

import re

WORKER = r"""
import json, os, signal, subprocess, sys, time

rank, what = os.environ["RANK"], sys.argv[2] if len(sys.argv) > 2 else ""
wait = [sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[-1]]
if "show" in what:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR"]
    print(json.dumps([sys.argv[1:-1], {name: os.environ[name] for name in names}, os.environ.get("SEEN")]))
if "lines" in what:
    for i in range(3000):
        print(f"{rank}:{i}")
    print("x" * 200_000, file=sys.stderr)
    print("a\rb\rc", end="")
if "much" in what:  # more than a pipe holds until it is read
    for i in range(3000):
        print("x" * 100)
    while not os.path.exists("read"):
        time.sleep(0.1)
    sys.exit()
if "children" in what:
    for i in range(2):  # one of them leaves the process group
        subprocess.Popen(wait, start_new_session=i == 1)
if "hidden" in what:  # an orphan in a session of its own, without the environment and the output of its parents
    subprocess.run(["sh", "-c", 'setsid env -i "$@" </dev/null >/dev/null 2>&1 &', "sh", *wait])
if "show" in what:
    sys.exit()
if "save" in what:
    def save(number, frame):
        os.write(1, f"saved {rank} {number}\n".encode())
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
if "deaf" in what:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", rank, flush=True)
time.sleep(1000)
"""

CPU = ("--platform", "cpu", "--num_gpus")

# One write that begins a line, so that the lines of other threads and of gloo neither split it nor precede it.
TRIED = r"""
def tried(name, f):
    try:
        print(f"\n{name}: {f()}\n", end="", flush=True)
    except (jzero.ConfigError, jzero.CheckpointError) as error:
        print(f"\n{name}: {type(error).__name__}: {error}\n", end="", flush=True)
"""


def said(job):
    """What the two ranks tried: name -> result or error."""
    found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
    return [{name: text for number, name, text in found if number == rank} for rank in "01"]
