"""`jzero report`: what every host is, what JAX sees on this one, and what is wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.launcher import hostfile, options, preflight
from jzero.launcher.job import Job, make_job
from jzero.launcher.link import Link


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 if nothing is wrong, else 1."""
    p = argparse.ArgumentParser(prog="jzero report", description=__doc__)
    p.add_argument("-H", "--hostfile", metavar="FILE", help="lines `host slots=N`: report on all of them")
    p.add_argument("--ssh_port", metavar="PORT")
    p.add_argument("--launcher_args", default="", metavar="ARGS", help="options for ssh")
    given = {name: value for name, value in vars(p.parse_args(argv)).items() if value}
    gpus = bool(given.get("hostfile") or hostfile.devices_here(os.environ))
    flags = [f"--{name}={value}" for name, value in given.items()]
    job = make_job(
        options.parse([*flags, "--platform", "gpu" if gpus else "cpu", "--no_python", "true"]), os.environ, os.getcwd()
    )
    hellos = asyncio.run(ask(job))
    found = preflight.faults(hellos, {host: len(ids) * gpus for host, ids in job.hosts.items()})
    print(preflight.table(hellos, found))
    here = next((hello for host, hello in hellos.items() if job.is_here(host) and "error" not in hello), None)
    wrong = this_host(here) if here else []
    for text in wrong:
        print(f"wrong: {text}")
    return 1 if found or wrong else 0


async def ask(job: Job) -> dict[str, Any]:
    """host -> what its agent says of it."""
    links = await asyncio.gather(*(Link.to(job, host) for host in job.hosts))
    said = await asyncio.gather(*(link.answer("hello", 20) for link in links))
    for link in links:
        link.close()
    await asyncio.gather(*(link.process.wait() for link in links))
    return dict(zip(job.hosts, said, strict=True))


def this_host(hello: Mapping[str, Any]) -> list[str]:
    """Print what JAX sees here and how the GPUs are connected; what is wrong with it."""
    import jax

    versions, wrong = hello["versions"], []
    if not hello["gpus"] and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # or a plugin complains
    try:
        devices = jax.devices()
        print(f"JAX sees {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
        if hello["gpus"] and jax.default_backend() != "gpu":
            plugin = "with it" if any("plugin" in name for name in versions) else "without a CUDA plugin"
            wrong.append(
                f"{hello['gpus']} GPUs, and JAX {plugin} uses {jax.default_backend()}: install 'jzero[cuda12]' or "
                f"'jzero[cuda13]', and see JAX_PLATFORMS = {os.environ.get('JAX_PLATFORMS')!r}"
            )
    except RuntimeError as error:
        wrong.append(f"JAX finds no device: {error}")
    for name, version in versions.items():
        if "plugin" in name and version != versions.get("jaxlib"):
            wrong.append(f"{name} {version} with jaxlib {versions.get('jaxlib')}: install the same version of both")
    if hello["gpus"] > 1 and shutil.which("nvidia-smi"):
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
        print(re.sub(r"\x1b\[[0-9;]*m", "", topology))
    shared = os.statvfs("/dev/shm")
    if hello["gpus"] > 1 and shared.f_bavail * shared.f_frsize < 2**30:
        wrong.append("/dev/shm has less than 1 GiB free, which NCCL may need: raise it (docker: --shm-size=8g)")
    return wrong
