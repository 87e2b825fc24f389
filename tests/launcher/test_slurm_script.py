"""The batch script for Slurm of the manual, with stand-ins for the commands in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PATIENCE, ROOT, stand_in

SRUN = (  # the variables that it sets for its processes
    "SLURM_PROCID={r} SLURM_LOCALID={r} SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='2' "
    "SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=7{port}"
)
STAND_INS = {
    "openssl": 'echo "$@" | sha256sum | cut -c1-64',
    "scontrol": 'echo "scontrol $@"',
    # They show their own options, and run the command after them.
    "srun": 'echo "srun $@"\nuntil [ "$1" = python -o "$1" = apptainer ]; do shift; done\n{starts}',
    "apptainer": 'echo "apptainer $@"\nuntil [ "$1" = train.sif ]; do shift; done\nshift\nexec "$@"',
}


@pytest.mark.processes
@pytest.mark.parametrize("container", ["", "Pyxis", "Apptainer"])
def test_the_script_for_slurm(tmp_path, container):
    """Its processes find each other; a job that has saved is queued again, in a container too."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    script = re.search(r'^```bash title="train.sbatch"\n(.*?)^```', page, re.M | re.S)[1]
    if container:
        script = re.sub(rf"^# (.* # {container})$", r"\1", script, flags=re.M)
    (tmp_path / "train.sbatch").write_text(script)
    meets = "import jax, jzero\njzero.init_distributed()\nassert jax.process_count() == 2\n"
    (tmp_path / "train.py").write_text(
        f"import os, sys\n{meets if not container else ''}"
        "line = f\"{len(os.environ['JZERO_SECRET'])} {os.environ['JZERO_RESUME']}\\n\"\n"
        "os.write(1, line.encode())  # at once, so that the lines of two processes stay whole\n"
        # As jzero after a save: JAX aborts a process whose process 0 ends first.
        f"{'jax.distributed.shutdown()' if not container else ''}\nsys.exit(75)\n"
    )
    shim = SRUN.format(r="{r}", port=os.getpid() % 1000 + 8000)
    starts = "\n".join([f'{shim.format(r=r)} "$@" &\nlast=$!' for r in (0, 1)] + ["wait $last"])
    for name, lines in STAND_INS.items():
        path = stand_in(tmp_path / "bin", name, lines.replace("{starts}", starts) + "\n")
    env = {
        "PATH": path.replace(":", f":{Path(sys.executable).parent}:", 1), "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu", "SLURM_JOB_ID": "12", "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "train.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 75, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("64 auto") == 2, done.stdout + done.stderr
    assert "scontrol requeue 12" in lines  # the first process may end after the last one
    there = f"{tmp_path}"
    command = {
        "": "python -u train.py",
        "Pyxis": "--container-image=registry.example.com#train:1 "
        f"--container-mounts={there}:{there} --container-workdir={there} python -u train.py",
        "Apptainer": f"apptainer exec --nv --bind {there} --pwd {there} train.sif python -u train.py",
    }[container]
    assert lines[0] == f"srun --kill-on-bad-exit=1 --label {command}"
