"""The manifest of a job for Kubernetes: a JobSet, what a patch file changes in it, and its YAML."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from jzero.errors import ConfigError
from jzero.launcher.job import Job

_TEXT = "tag:yaml.org,2002:str"
# A text that every version of YAML reads as a text, without quotes.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)-{0,2}[a-z/]+([\w./=:-]*[\w/])?", re.I | re.A)


def jobset(job: Job, env: Mapping[str, str]) -> object:
    """Make the JobSet (jobset.sigs.k8s.io) of a job: one pod per host, in which `jzero --no_ssh` starts the processes.

    `--launcher_args` has the form "image=IMAGE [name=NAME] [namespace=NAMESPACE] [patch=FILE]". The pods get the
    variables of `env` that `--export` names, and as much of their memory under /dev/shm as they need: NCCL and data
    loaders share it there, and a container has 64 MiB otherwise.
    """
    given = dict(word.partition("=")[::2] for word in shlex.split(job.options.launcher_args))
    if unknown := given.keys() - {"image", "name", "namespace", "patch"}:
        raise ConfigError(
            f"--launcher_args = {job.options.launcher_args!r}: {sorted(unknown)}: allowed are image, name, namespace, "
            "patch"
        )
    if not given.get("image"):
        raise ConfigError(
            '--launcher k8s: needs an image that contains jzero and the script: --launcher_args "image=IMAGE"'
        )
    name, o, per_host = given.get("name", "jzero"), job.options, job.per_host(devices=True)
    flags = [
        f"--{flag}"
        for flag in ("one_process_per_node", "module", "no_python", "no_local_rank", "resume")
        if getattr(o, flag)
    ]
    files = ("venv_script", "enable_each_rank_log")
    flags += [f"--{flag}={_literal(value)}" for flag in files if (value := getattr(o, flag))]
    args = [
        "-m", "jzero", "--no_ssh", "--node_rank", "$(JOB_COMPLETION_INDEX)", "--num_nodes", str(len(job.hosts)),
        "--num_gpus", str(per_host), "--platform", o.platform, "--master_addr", f"{name}-node-0-0.{name}",
        "--master_port", str(job.port), "--hang_timeout", f"{o.hang_timeout:g}", "--grace", f"{o.grace:g}", *flags,
        *map(_literal, (o.script, *o.script_args)),
    ]  # fmt: skip
    container: dict[str, object] = {"name": "jzero", "image": given["image"], "command": ["python"], "args": args}
    container["workingDir"] = job.cwd
    if exported := dict.fromkeys(item.partition("=")[0] for item in o.export):
        container["env"] = [{"name": name, "value": _literal(env[name])} for name in exported]
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    if o.platform == "gpu":
        container["resources"] = {"limits": {"nvidia.com/gpu": per_host}}
    pods = {
        "parallelism": len(job.hosts), "completions": len(job.hosts), "completionMode": "Indexed", "backoffLimit": 0,
        "template": {"spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": int(o.grace) + 10, "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }},
    }  # fmt: skip
    meta = {"name": name} | ({"namespace": given["namespace"]} if "namespace" in given else {})
    result: dict[str, object] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "failurePolicy": {"maxRestarts": o.max_restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
        },
    }
    return _patched(result, given["patch"]) if "patch" in given else result


def _literal(word: str) -> str:
    """Escape a word, because Kubernetes expands $(NAME), and $$ to $."""
    return word.replace("$", "$$")


def _patched(manifest: dict[str, object], path: str) -> object:
    """Merge a YAML or JSON file into the manifest.

    Mappings are merged, and null removes a key. Items of a list are merged with those of the same name (mounts: of the
    same path) and otherwise added. Other values replace those of the manifest.

    Raises:
      ConfigError: the file cannot be read, or does not fit the manifest.
    """
    try:
        # To JSON and back, as kubectl does: it makes texts of keys, and refuses sets, circles and infinity.
        patch = json.loads(json.dumps(yaml.load(Path(path).read_bytes(), _Loader), allow_nan=False))  # noqa: S506
        return _merged(manifest, patch, "")
    except OSError as error:
        raise ConfigError(f"--launcher_args: patch={path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"--launcher_args: patch={path}: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"--launcher_args: patch={path}: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """Reads dates as texts, as kubectl does."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


def _merged(old: object, new: object, at: str) -> object:
    """Return `old` with what `new` changes; a ValueError names the place that does not fit."""
    if isinstance(old, dict):
        if not isinstance(new, dict):
            raise ValueError(f"{at or 'the file'} must be a mapping, as in the manifest that --dry_run prints")
        result = dict(old)
        for key, value in new.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merged(old[key], value, f"{at}.{key}".lstrip(".")) if key in old else value
        return result
    if isinstance(old, list):
        if not isinstance(new, list):
            raise ValueError(f"{at} must be a list, as in the manifest that --dry_run prints")
        for by in ("mountPath", "name"):
            if all(isinstance(item, dict) and by in item for item in old):
                return _merged_by(by, old, new, at)
    return new


def _merged_by(by: str, old: list, new: list, at: str) -> list:
    items = {item[by]: item for item in old}
    for item in new:
        if not isinstance(item, dict) or not isinstance(name := item.get(by), str):
            raise ValueError(f"{at}: each item needs a {by}")
        items[name] = _merged(items[name], item, f"{at}[{name}]") if name in items else item
    return list(items.values())


def to_yaml(value: object) -> str:
    """Write a JSON value as YAML, in blocks.

    >>> print(to_yaml({"args": ["--platform", "cpu", "$(X)"], "limits": {"nvidia.com/gpu": 8}}), end="")
    args:
    - --platform
    - cpu
    - "$(X)"
    limits:
      nvidia.com/gpu: 8
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


# PyYAML writes "1e3" without quotes, which kubectl reads as a number.
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style=None if _PLAIN.fullmatch(text) else '"')
)
