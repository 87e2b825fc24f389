"""`jzero report`: versions and devices of every host, what JAX finds on this one, and what is wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import re

from jzero.distributed import machine
from jzero.errors import install_command
from jzero.launcher import hostfile, options
from jzero.launcher.connecting import Connecting, Hello, faults, host_table
from jzero.launcher.job import Job, make_job
from jzero.launcher.link import close_all
from jzero.launcher.output import quiet_stderr


def main(args: argparse.Namespace) -> int:
    """Print the table of hosts; return 0 if nothing is wrong, else 1."""
    gpus = bool(args.hostfile or hostfile.devices_here(os.environ))
    flags = [f"--{name}={value}" for name, value in vars(args).items() if value]
    # A job that is never started: it knows the hosts, and how to reach them.
    job = make_job(
        options.parse([*flags, "--platform", "gpu" if gpus else "cpu", "--no_python", "true"]), os.environ, os.getcwd()
    )
    hellos = asyncio.run(ask(job))
    found = faults(hellos, {host: len(ids) * gpus for host, ids in job.hosts.items()})
    for host, hello in hellos.items():
        found.setdefault(host, []).extend(weak_points(hello) if "error" not in hello else [])
    print(host_table(hellos, found))
    for host, hello in hellos.items():
        if hello.get("topology"):
            print(f"{host}\n{hello['topology']}")
    wrong = ""
    if any(map(job.is_here, job.hosts)):
        with quiet_stderr():
            wrong = check_jax_here()
    return 1 if wrong or any(found.values()) else 0


async def ask(job: Job) -> dict[str, Hello]:
    """Return host -> its agent's hello, with the topology of several GPUs."""
    connecting = Connecting(job, "")

    async def one(host: str) -> Hello:
        hello = await connecting.greet(host)
        if hello.get("gpus", 0) > 1:
            text = await connecting.links[host].ask("topology", 20, topology=True)
            hello["topology"] = re.sub(r"\x1b\[[0-9;]*m", "", text if isinstance(text, str) else "")  # colours
        return hello

    hellos = dict(zip(job.hosts, await asyncio.gather(*map(one, job.hosts)), strict=True))
    await close_all(connecting.links.values())
    return hellos


def weak_points(hello: Hello) -> list[str]:
    """List faults that let a job start but slow or break it later."""
    versions, gpus, found = hello["versions"], hello["gpus"], []
    plugins = {name: version for name, version in versions.items() if name.endswith("-plugin")}
    if gpus and not plugins:
        found.append(f"{gpus} GPUs and no CUDA plugin: {install_command('cuda12')}, or the extra cuda13")
    for name, version in plugins.items():
        if version != versions.get("jaxlib"):
            found.append(f"{name} {version} with jaxlib {versions.get('jaxlib')}: install the same version of both")
    if wrong := machine.nccl_fault(hello.get("nccl_path", ""), versions.get("nccl", "?"), versions):
        found.append(wrong)
    if gpus > 1 and hello["shared_memory"] < 2**30:
        found.append("/dev/shm has less than 1 GiB free, which NCCL may need: raise it (docker: --shm-size=8g)")
    return found


def check_jax_here() -> str:
    """Print the devices that JAX finds on this machine; print and return their fault, "" if there is none."""
    import jax

    if not hostfile.devices_here(os.environ) and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # a CUDA plugin without a GPU prints an error
    try:
        devices = jax.devices()
    except RuntimeError as error:
        wrong = f"JAX finds no device: {error}"
    else:
        print(f"JAX sees {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
        nccl = machine.loaded_nccl()
        print(f"NCCL {nccl[1]} is loaded from {nccl[0]}\n" if nccl else "", end="")
        idle = hostfile.devices_here(os.environ) and jax.default_backend() != "gpu"
        setting = f" (JAX_PLATFORMS = {os.environ['JAX_PLATFORMS']!r})" if "JAX_PLATFORMS" in os.environ else ""
        wrong = f"JAX does not use this machine's GPUs{setting}: see its plugin and driver in the table" if idle else ""
        wrong = wrong or "; ".join(machine.process_faults(os.environ, 1))
    if wrong:
        print(f"wrong: {wrong}")
    return wrong
