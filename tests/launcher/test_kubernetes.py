"""The JobSet for Kubernetes: what its pods run, the patch file, and its YAML, which PyYAML reads back."""

import json
import os
import re
from pathlib import Path

import yaml
from golden import snapshots
from helpers.stored_cases import check_cases
from jobs import ROOT, stand_in
from test_commands import NASTY

from jzero import cli
from jzero.launcher import options
from jzero.launcher.job import make_job
from jzero.launcher.kubernetes import to_yaml

TWO = ("--num_nodes", 2, "--num_gpus", 4)


def expanded(word, env):
    """Expand an argument as Kubernetes does."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: env.get(m[1], m[0]) if m[1] else "$", word)


def test_jobset(here, pytestconfig):
    here.setenv("SEEN", "$(X)")
    words = [*TWO, "--grace", 20, "--export", "SEEN", "--export", "SET=b=c", "--max_restarts", 3]
    words += ["--launcher_args", "image=here/is:1 name=run namespace=us", "train.py", *NASTY, "$$(X)", "$(SEEN)"]
    manifest, pod = here.manifest(*words)
    (container,) = pod["containers"]
    assert container["workingDir"] == os.getcwd()
    container["workingDir"] = "HERE"
    snapshots.check("jobset.json", manifest, pytestconfig.getoption("--update-golden"))
    args, env = container["args"], container["env"]
    assert {e["name"]: expanded(e["value"], {"X": "wrong"}) for e in env} == {"SEEN": "$(X)", "SET": "b=c"}
    here.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    ours = make_job(options.parse(["--launcher", "k8s", *map(str, words)]), os.environ, os.getcwd()).processes
    for node in (0, 1):  # each pod reads it
        seen = {"JOB_COMPLETION_INDEX": str(node), "SEEN": "wrong"}
        m, name, *rest = [expanded(word, seen) for word in args]
        assert (m, name) == ("-m", "jzero")
        parsed = options.parse(rest)
        assert (parsed.node_rank, parsed.grace) == (node, 20)
        assert parsed.script_args == [*NASTY, "$$(X)", "$(SEEN)"]
        part = here.dry(*rest)
        assert part["coordinator"] == "run-node-0-0.run:29500"
        for theirs, mine in zip(part["processes"], ours, strict=True):
            same = ["rank", "local_rank", "device_ids"]
            assert [theirs[k] for k in same] == [vars(mine)[k] for k in same]


def test_jobset_passes_options_on(here):
    flags = ["one_process_per_node", "module", "no_local_rank", "resume"]
    words = [*(f"--{flag}" for flag in flags), "--venv_script=a b", "--enable_each_rank_log=/l$"]
    cpu = ["--platform", "cpu", "--launcher_args", "image=i", "--num_nodes", 3, "--num_gpus", 2]
    _, pod = here.manifest(*cpu, *words, "--hang_timeout", 60, "--master_port", 1234, "m")
    (container,) = pod["containers"]
    assert "resources" not in container
    args = [expanded(word, {"JOB_COMPLETION_INDEX": "2"}) for word in container["args"][2:]]
    theirs, ours = vars(options.parse(args)), vars(options.parse([*map(str, cpu), *words, "m"]))
    same = [*flags, "venv_script", "enable_each_rank_log", "platform"]
    assert [theirs[name] for name in same] == [ours[name] for name in same]
    assert [theirs[name] for name in ("hang_timeout", "master_port", "num_nodes", "num_gpus")] == [60, 1234, 3, 2]


PATCH = """
metadata: {labels: {since: 2026-01-02}}
spec: {replicatedJobs: [{name: node, template: {spec: {backoffLimit: null, template: {spec: {
  volumes: [{name: shm, emptyDir: {sizeLimit: 64Gi}}, {name: old, hostPath: {path: /old}}],
  containers: [
    {name: jzero, env: [{name: SEEN, value: patched}], resources: {limits: {rdma/ib: 8}}, volumeMounts: [
      {name: old, mountPath: /a}, {name: old, mountPath: /b}]},
    {name: sidecar, image: "side:1"}]}}}}}]}
"""


def test_patch(here):
    """The manual's, and this one, merged by hand."""
    page = (ROOT / "docs/clusters.md").read_text()
    text = re.search(r'^```yaml title="pods.yaml"\n(.*?)^```', page, re.M | re.S)[1]
    words, patch = [*TWO, "--export=SEEN=1", "--export=KEPT=2", "train.py"], here.write("pods.yaml", text)
    expected, pod = here.manifest(f"--launcher_args=image=i patch={patch}", *words)
    assert expected["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    assert [one["name"] for one in pod["volumes"]] == ["shm", "data"]
    assert list(pod["nodeSelector"]) == ["cloud.google.com/gke-accelerator"]
    assert [one["name"] for one in pod["containers"][0]["env"]] == ["SEEN", "KEPT", "JZERO_SECRET"]

    patch = here.write("patch.yaml", PATCH)
    patched, _ = here.manifest(f"--launcher_args=image=i patch={patch}", *words)
    expected, pod = here.manifest("--launcher_args=image=i", *words)
    expected["metadata"]["labels"] = {"since": "2026-01-02"}  # a text, though it is a date to YAML
    del expected["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"]
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "64Gi"
    pod["volumes"].append({"name": "old", "hostPath": {"path": "/old"}})
    (container,) = pod["containers"]
    pod["containers"].append({"name": "sidecar", "image": "side:1"})
    container["volumeMounts"] += [{"name": "old", "mountPath": "/a"}, {"name": "old", "mountPath": "/b"}]
    container["env"][0]["value"] = "patched"
    container["resources"]["limits"]["rdma/ib"] = 8
    assert patched == expected


def test_a_wrong_patch(here, pytestconfig):
    def outcome(text):
        path = "nowhere" if text is None else here.write("patch.yaml", text)
        said = here.refused("--launcher=k8s", *TWO, f"--launcher_args=image=i patch={path}", "train.py")
        assert said.count("\n") == 1
        return re.sub("(compliant): inf", r"\1", said.replace(str(here.path), "HERE"))  # later Pythons name the value

    check_cases(Path(__file__).with_name("patch_mistakes.jsonl"), outcome, pytestconfig)


STRANGE = [
    "\x7f\x85\u2028\ufeff\ufffe\U0001f600",
    "yes", "NO", "on", "null", "~", "1", "1e3", "0x1", "1:30", "2026-01-02", ".inf", "=", "<<", "a:", "a: b", "a #b",
    "- a", "-", "--", "---", "...", "?", "&a", "*a", "!a", "|", ">", "%", "@", "`", "'", '"', "{}", "[]", " a", "a ",
]  # fmt: skip


def test_yaml_is_read_back():
    for texts in ([], STRANGE, [f"{chr(n)}{more}" for n in range(256) for more in ("", "0", ": -")]):
        value = {"flat": texts, "deep": {one: {one: [[one], [], {}, None, True, 1]} for one in texts}}
        assert yaml.safe_load(to_yaml(value)) == value


def test_kubectl_gets_what_is_printed(here, capsys):
    script = f'echo "$@" > {here.path}/words\ncat > {here.path}/manifest\nexit 3\n'
    here.setenv("PATH", stand_in(here.path, "kubectl", script))
    words = ["--launcher", "k8s", *map(str, TWO), "--launcher_args", "image=i", "--export", "A_TOKEN=b", "train.py"]
    assert cli.main(words) == 3
    assert (here.path / "words").read_text() == "apply -f -\n"
    given = yaml.safe_load((here.path / "manifest").read_text())
    printed, _ = here.manifest(*words[2:])
    assert json.dumps(given).replace('"value": "b"', '"value": "***"') == json.dumps(printed)
