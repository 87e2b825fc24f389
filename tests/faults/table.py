"""The table of faults: what goes wrong, what jzero does, and within how many seconds, or the test that provokes it.

`test_faults.py` runs the rows that provoke their fault themselves, and checks that the tests named by the others exist.
`docs/faults.py` writes docs/faults.md from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jzero
from jzero.config import Config
from jzero.data import DataLoader
from jzero.launcher import options
from jzero.launcher.hostfile import read_hostfile
from jzero.launcher.job import make_job
from jzero.models.mlp import MLP, cross_entropy


class Fault(NamedTuple):
    """A fault, and what jzero does; `test` provokes it, or `provoke`, whose error has these parts in its one line."""

    fault: str
    outcome: str
    test: str = ""
    provoke: Callable[[Path], Any] | None = None
    parts: tuple[str, ...] = ()


def refused(fault, provoke, *parts):
    return Fault(fault, "one line, before anything starts", provoke=provoke, parts=parts)


def elsewhere(test, fault, outcome):
    return Fault(fault, outcome, test=test)


def load(config):
    """Load a config from a dict or a path."""
    return lambda folder: Config.load(config)


def load_text(text):
    return lambda folder: Config.load(written(folder / "config.json", text.encode()))


def hosts(text):
    return lambda folder: read_hostfile(written(folder / "hosts", text.encode()))


def command(*words, **env):
    """Plan a job with these options and variables."""
    parsed = [*words, "--no_python", "true"]
    return lambda folder: make_job(options.parse(parsed), {"PATH": "/bin:/usr/bin"} | env, str(folder))


def variables(content):
    """Plan a job in a folder with this `.jzero_env`."""
    return lambda folder: command("--platform=cpu")(written(folder / ".jzero_env", content).parent)


def written(path, content):
    path.write_bytes(content)
    return path


def batches(size):
    """Load batches of `size` from 16 rows."""

    def provoke(folder):
        model = jzero.from_flax(MLP, cross_entropy)
        config = {"train_batch_size": size, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
        return DataLoader((np.zeros((16, 784), np.float32), np.zeros(16, np.int32)), step)

    return provoke


def circle():
    data = {}
    data["a"] = data
    return data


MEGABYTE = "k" * 10**6
DIGITS = "9" * 5000

TABLE: dict[str, list[Fault]] = {
    "Processes": [
        elsewhere("test_an_unexpected_error_in_the_launcher", "an unexpected exception in the command",
                  "the job ends, the error names the exception"),
        elsewhere("test_a_launcher_that_is_stuck_ends_after_sigterm", "the command is stuck and gets SIGTERM",
                  "it ends after `--grace` and 8 s"),
        elsewhere("test_sigterm_when_another_rank_takes_no_more_steps", "SIGTERM after another rank's last step",
                  "the others run to their end; if a rank is stuck, they end without a checkpoint after a third of "
                  "`--grace`"),
        elsewhere("test_a_rank_that_fails_after_ctrl_c", "Ctrl-C, and a rank exits with 3",
                  "the job ends with 130, and names the rank and its code"),
        elsewhere("test_what_ends_the_thread_reaches_the_consumer",
                  "a data source calls `sys.exit` or raises KeyboardInterrupt", "it reaches the training loop"),
        elsewhere("test_kill_a_rank", "a rank is killed, also with children that have left its process group",
                  "the job ends and names the rank; no process is left"),
        elsewhere("test_kill_the_command", "the command is killed", "the agents kill all processes"),
        elsewhere("test_a_rank_that_hangs", "a rank stops, so that no step finishes",
                  "after `--hang_timeout` all stacks, the rank to look at, and every process ends"),
        elsewhere("test_no_child_hides", "an agent is killed", "its processes are killed, its folder is deleted"),
        elsewhere("test_no_child_hides",
                  "an agent is stopped, or it or its guard is killed, and a detached child has emptied its environment",
                  "a restart begins without any process of the attempt before"),
        elsewhere("test_a_job_without_the_launcher", "a rank stops under srun, mpirun or torchrun",
                  "after the limit of the section `watchdog` all stacks, the steps of all ranks, and every process "
                  "ends"),
        elsewhere("test_restarts_that_would_not_help",
                  "`--max_restarts`, and the same failure at the same step, or an error in the config",
                  "no more starts; the number of attempts and the error"),
        elsewhere("test_a_mistake_and_ctrl_c_are_one_line", "a `ConfigError`, or Ctrl-C while JAX traces or compiles",
                  "one line with the script's own line, no traceback (`JZERO_TRACEBACK=1` prints it)"),
        elsewhere("test_a_job_repeats_a_mistake_once", "a `ConfigError` in a job",
                  "one line of each rank, and one of the job"),
        elsewhere("test_a_job_s_last_lines_are_meaningful",
                  "a rank fails after hundreds of lines that JAX's libraries log",
                  "the job's last lines are the script's"),
    ],
    "Network": [
        elsewhere("test_a_host_name_that_cannot_be_encoded",
                  "a host name that cannot be looked up (`worker..1`, a part of 64 characters)",
                  "one line, before anything starts"),
        elsewhere("test_all_bad_lines_at_once", "a host name that begins with -",
                  "one line, before anything starts; ssh gets `--` before names"),
        elsewhere("test_a_host_that_is_not_there", "a host that does not exist or does not answer",
                  "nothing starts; a table of the hosts' faults"),
        elsewhere("test_the_network_ends", "the network between two hosts ends",
                  "both sides notice and end their processes"),
        elsewhere("test_one_machine", "a stranger on the network calls a job on one machine",
                  "nothing listens there: the job listens on 127.0.0.1 only"),
        elsewhere("test_two_hosts", "a stranger calls a job on two hosts",
                  "it listens on the one address by which the hosts reach each other"),
        elsewhere("test_strangers_do_no_harm",
                  "strangers at the rendezvous: silent, a byte per second, 300 MB in one line, other protocols",
                  "the job's processes meet without delay; 1 MB of memory"),
        elsewhere("test_wrong_ranks_are_refused", "a process with a rank out of range, or one that is already there",
                  "it is refused in one line; the others meet"),
        elsewhere("test_who_does_not_know_the_secret", "a process that does not know the job's secret",
                  "it is refused in one line"),
        elsewhere("test_the_error_names_who_was_refused", "processes of one job have different secrets",
                  "each refused one ends at once; the others name the refused ranks and the fix after `JZERO_TIMEOUT`"),
        elsewhere("test_a_proof_is_good_for_one_connection", "a stranger repeats what another process has sent",
                  "it is not let in"),
        elsewhere("test_a_stranger_that_listens", "a stranger listens in the place of process 0", "one line"),
        elsewhere("test_a_bind_address_that_is_none", "`JZERO_BIND_ADDRESS` is not an address of this host",
                  "one line with the fix"),
    ],
    "Data, checkpoints and weights": [
        elsewhere("test_values_that_32_bits_do_not_hold", "2**40 + 7 in a batch, which JAX would cut to 7, or 1e300",
                  "an error that names the leaf; nothing is trained"),
        elsewhere("test_one_sample_that_overflows_in_one_layer",
                  'one sample overflows in one layer, with `non_finite.action` "stop"',
                  "the run ends in the state before that step; the error names layer, micro-batch, replica and row"),
        elsewhere("test_one_replica_whose_copy_is_bad",
                  'one device\'s copy of a parameter is NaN, with `non_finite.action` "stop"',
                  "the error names the leaf, the layer, the device and the devices whose copy is finite"),
        elsewhere("test_one_bit_on_one_device", "one bit of one device's copy flips, with `desync_check.every`",
                  "a line names the leaf and the device"),
        elsewhere("test_the_process_whose_data_are_slow_is_named",
                  "one process's data are slow, with `straggler_check.every`",
                  "a line names the process, its host, and the milliseconds for which the others wait"),
        elsewhere("test_saves_of_two_jobs", "a second job saves into the same directory",
                  "the second is refused and names the first; the first loses nothing"),
        elsewhere("test_the_second_job_is_told_and_a_dead_one_is_replaced",
                  "the job that owned the directory was killed, on the same host", "the next one takes over at once"),
        elsewhere("test_an_owner_on_another_host", "the job that owned the directory was killed, on another host",
                  "the next one takes over after 30 s"),
        elsewhere("test_a_damaged_latest",
                  "`latest` holds zeros, a megabyte, ../x or an absolute path, or is a directory or a fifo",
                  "a load is one line; a resume prints the fault and takes the newest whole checkpoint"),
        elsewhere("test_a_place_that_cannot_be_written",
                  "a path that a config names has a name too long, a dangling link or a loop, or is forbidden",
                  "one line with the key, before anything starts; `--max_restarts` does not start it again"),
        elsewhere("test_crafted_notes_hide_no_other_checkpoint",
                  "`notes.json` of the newest checkpoint has a right checksum and other contents, or is a fifo",
                  "a resume prints the fault and takes the next older checkpoint"),
        elsewhere("test_invalid_files", "a token file or its note is empty, damaged or another file's", "one line"),
        elsewhere("test_a_full_disk", "the disk is full during a save", "one line; the checkpoints before it stay"),
        elsewhere("test_a_full_disk_is_a_warning", "the disk is full during a step",
                  "a warning: the run's ledger ends; training goes on"),
        elsewhere("test_few_cases",
                  "a line of a ledger, or of `metrics.jsonl`, has other types, deep nesting or numbers of 5,000 digits",
                  "readers skip the line; one line if no step is left"),
        elsewhere("test_a_torn_line_is_skipped_and_continued", "a kill tears the last line of the ledger",
                  "readers skip the line; the next start begins a new one"),
        elsewhere("test_a_directory_that_vanishes", "the directory vanishes during a save",
                  "one line that names it; the save does not count"),
        elsewhere("test_a_save_whose_thread_dies", "the thread of a save dies, wherever, or cannot start",
                  "`wait()` and the next save raise; the draft is deleted"),
        elsewhere("test_each_fault",
                  "safetensors: negative, overlapping or missing bytes, doubled names, float shapes, deep JSON, other "
                  "dtypes", "one line; no other bytes than the tensor's are read"),
        elsewhere("test_a_header_of_more_than_100_mb_is_not_read", "safetensors: a header of more than 100 MB",
                  "one line; it is not read"),
        elsewhere("test_an_index_that_points_elsewhere", "safetensors: an index that names ../x or /etc/passwd",
                  "one line; only files beside it are read"),
        elsewhere("test_few_cases", "any byte of a checkpoint is changed, missing, or in another file",
                  "one line, or the state that was saved"),
    ],
    "Configs": [
        refused("JSON nested 100,000 deep", load_text('{"a":' * 10**5 + "1" + "}" * 10**5), "nested too deeply"),
        refused("a dict that contains itself", load(circle()), "nested deeper than 20"),
        refused("20,000 keys", load({f"k{n}": n for n in range(20_000)}), "more than 1,000 keys"),
        refused("a file of 2 MB", load_text('{"seed": 1}' + " " * 2 * 10**6), "more than 1,048,576 characters"),
        refused("an hjson string without an end", load_text("{a: '''x"), "neither JSON nor hjson"),
        refused("a lone surrogate in a path", load({"checkpoint": {"dir": "\ud800"}}), "checkpoint.dir",
                "lone surrogate"),
        refused("a NUL in a path", load({"checkpoint": {"dir": "a\0b"}}), "checkpoint.dir", "a NUL"),
        refused("a NUL in the config's own path", load("a\0b"), "no such file"),
        refused("a key of a megabyte", load({MEGABYTE: 1}), "kkkk", "more) ...", "unknown key"),
        refused("an optimizer's name of a megabyte", load({"optimizer": {"type": MEGABYTE}}), "optimizer.type"),
        refused("a list under a key that is a tuple", load({"a": [{(1, 2): 3}]}), "a = <list>", "unknown key"),
        refused("a number of 5,000 digits", load({"seed": int("9" * 4000) ** 2}), "seed = <int>", "up to 4294967295"),
        refused("a number of 5,000 digits in a file", load_text(f'{{"seed": {DIGITS}}}'), "4300 digits"),
        refused("a regular expression of 5,000 parentheses", load({"frozen_parameters": ["(" * 5000]}), "compile"),
        refused("a regular expression of a megabyte", load({"frozen_parameters": ["a|" * 500_000]}), "100,000 char"),
        refused("XLA options whose names are not strings", load({"compiler_options": {1: 2}}), "the name 1 must be"),
        refused("seed = 2**40 + 7, which JAX would read as 7", load({"seed": 2**40 + 7}), "up to 4294967295"),
        refused("a warm-up of 10**30 steps",
                load({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10**30}}}),
                "scheduler.params.warmup_num_steps", "up to 2147483647"),
        refused("a batch of 2**31 rows", load({"train_batch_size": 2**31}), "train_batch_size", "up to 2147483647"),
        refused("a batch of 2**31 - 1 rows from 16", batches(2**31 - 1), "train_batch_size", "at most 1048576"),
    ],
    "Hostfiles and options": [
        refused("slots of 5,000 digits", hosts(f"a slots={DIGITS}\n"), "line 1", "at most 1024 slots"),
        refused("slots in other digits than 0-9", hosts("a slots=\u0668\n"), "HOST slots=N"),
        refused("--include with an id of 5,000 digits", command("--platform=cpu", f"--include=localhost:{DIGITS}"),
                "0 to"),
        refused("--num_gpus 99999999999", command("--platform=cpu", "--num_gpus=99999999999"), "at most 1024"),
        refused("a Slurm node list of ten million hosts",
                command("--platform=cpu", SLURM_JOB_NODELIST="gpu[1-9999999]"), "1-9999999"),
        refused("a Slurm range of letters", command("--platform=cpu", SLURM_JOB_NODELIST="gpu[a-b]"), "'a-b'"),
        refused("a `.jzero_env` that is not UTF-8", variables(b"A=1\n\xff\xfe=2"), ".jzero_env: cannot be read",
                "NAME=VALUE"),
        refused("a NUL in `.jzero_env`", variables(b"A=1\nB=2\0"), "line 2: 'B=2\\x00'", "NAME=VALUE"),
        elsewhere("test_a_wrong_patch", "a patch for Kubernetes that is no YAML, or does not fit the JobSet",
                  "one line with the file and the place; nothing is applied"),
        refused("SLURM_GPUS_ON_NODE that is not a number",
                command(SLURM_JOB_NODELIST="gpu1", SLURM_GPUS_ON_NODE="tesla:8"), "SLURM_GPUS_ON_NODE = 'tesla:8'"),
    ],
    "Files and secrets": [
        elsewhere("test_nothing_grows", "3,000 steps with 300 saves in two processes",
                  "descriptors, threads, memory and temporary files stay as they were after 1,000 steps"),
        elsewhere("test_no_link_is_followed",
                  "a link under the name of a temporary file (`latest.new`, progress, tokens)",
                  "the link is removed, its target stays as it was"),
        elsewhere("test_no_link_is_followed", "a fifo under the name of a temporary file",
                  "it is removed, the write goes on"),
        elsewhere("test_an_open_name_is_refused_rather_than_shared",
                  "another user makes a link just before the file is opened", "the write fails"),
        elsewhere("test_a_table_of_flops_replaces_only_its_own",
                  "a config's `flops_profiler.output_file` is a file of yours",
                  "one line, before anything starts; the file stays as it was"),
        elsewhere("test_monitors_follow_no_link", "a link under the name of a monitor's file",
                  "one line, or a warning; its target stays as it was"),
        elsewhere("test_the_pid_file", "the name of `--save_pid`'s file is taken",
                  "a link is removed; what cannot be removed is an error in one line"),
        elsewhere("test_the_agents_folder_is_private", "another user looks for a job's files",
                  "the agent's folder has mode 700"),
        elsewhere("test_no_secret_is_in_a_plan", "secrets among the variables, under every launcher",
                  "the plan, the manifest and errors print `***`"),
    ],
}  # fmt: skip
