"""The plan: the options, the ranks, environment and devices that `--dry_run` prints, and the secrets that it masks.

And the JobSet for Kubernetes: what its pods run, the patch file, and its YAML, which PyYAML reads back.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from golden import snapshots
from helpers.stored_cases import check_cases
from jobs import ROOT, A, B, stand_in
from test_commands import NASTY

from jzero import cli
from jzero.config import Config
from jzero.distributed.place import host_fault
from jzero.errors import ConfigError
from jzero.launcher import kubernetes, options
from jzero.launcher.job import make_job
from jzero.launcher.transports import BOOT


def test_options_are_frozen(pytestconfig):
    found = {" ".join(a.option_strings): a.default for a in options.parser()._actions if a.option_strings}
    snapshots.check("options.json", found, pytestconfig.getoption("--update-golden"))
    assert options.LAUNCHERS == ("ssh", "slurm", "openmpi", "k8s")


def test_what_follows_the_script_is_its_own(capsys):
    """Options of the launcher among it earn a warning."""
    words = ["-i", "x", "--", "--master_port", "1", "--num_gpus=4", "--lr=2", "two words", "", "-", "--help", "--num"]
    parsed = options.parse(["--num_gpus", "2", "train.py", *words])
    assert (parsed.script, parsed.script_args, parsed.num_gpus, parsed.include) == ("train.py", words, 2, "")
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in warnings] == ["--master_port", "--num_gpus=4"]
    assert all("goes to the script" in line and line.endswith("write it before train.py") for line in warnings)


ENV = re.compile("(WORLD|LOCAL|CROSS)_SIZE|(LOCAL_|CROSS_)?RANK|MASTER_|CUDA_VISIBLE|JAX_(PLATF|NUM)|JZERO_HEARTBEAT_S")


def test_what_a_command_plans(here, pytestconfig, monkeypatch):
    """Ranks are node-major in the order of the hostfile; CUDA_VISIBLE_DEVICES is this machine's alone."""

    def outcome(case):
        path = here.hosts(*case.get("hosts", ["a slots=1"]))
        words = [*(["-H", path] if "hosts" in case and "default" not in case else []), *case["words"]]
        with monkeypatch.context() as patch:
            patch.setattr("jzero.launcher.job.HOSTFILE", path if "default" in case else "none")
            patch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
            for name, value in {"JAX_PLATFORMS": "cuda", **case.get("env", {})}.items():
                patch.setenv(name, value)
            plan = here.dry(*words)
        kept = {"host", "rank", "local_rank", "device_ids"}
        processes = [{name: one[name] for name in one if name in kept} | one["env"] for one in plan["processes"]]
        plan["processes"] = [{k: v for k, v in one.items() if k in kept or ENV.match(k)} for one in processes]
        shown = json.dumps({name: plan[name] for name in ("hosts", "coordinator", "processes", "commands")})
        names = {shlex.quote(BOOT): "BOOT", BOOT: "BOOT", sys.executable: "PYTHON", str(here.path): "HERE"}
        for text, name in names.items():
            shown = shown.replace(json.dumps(text)[1:-1], name)
        return json.loads(shown)

    check_cases(Path(__file__).with_name("plans.jsonl"), outcome, pytestconfig)
    plan = here.printed("--platform=cpu", "train.py", "run")
    assert cli.main(["run", "--dry_run", "--platform=cpu", "train.py", "run"]) == 0  # a word for the same
    assert here.capsys.readouterr().out == plan


def test_refused(here, pytestconfig):
    """With --no_ssh one device too few is an error already: the other hosts would number ranks differently."""

    def outcome(case):
        here.setenv("CUDA_VISIBLE_DEVICES", case["visible"])
        return here.refused(*case["words"], "train.py").strip().replace(str(here.path), "HERE")

    here.write("two", f"{A} slots=2", "localhost slots=2")
    here.write("uneven", f"{A} slots=1", f"{B} slots=2")
    check_cases(Path(__file__).with_name("refused.jsonl"), outcome, pytestconfig)


NAMES = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "MLFLOW_TRACKING_PASSWORD", "TF_CREDENTIALS", "NCCL_my_key"]
SECRET = "hunter2"


@pytest.fixture
def secrets(here, monkeypatch):
    for name in [*NAMES, "JZERO_SECRET"]:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "k8s"])
def test_no_secret_is_in_a_plan(here, launcher):
    """Arguments are shown as they are: a masked one would suggest that command lines keep secrets."""
    exported = f"--export=MY_PASSWORD={SECRET}", "--export=NCCL_DEBUG"
    words = ["--platform=cpu", *exported, "train.py", "--api_key", "shown"]
    if launcher == "k8s":
        manifest, pod = here.manifest("--launcher_args=image=i", "--num_nodes=1", "--num_gpus=1", *words)
        env = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
        assert env == {"MY_PASSWORD": "***", "NCCL_DEBUG": "INFO"}
        assert "resources" not in pod["containers"][0]  # on CPUs
        text = json.dumps(manifest)
    else:
        plan = here.dry(f"--launcher={launcher}", "--hostfile", here.hosts("localhost slots=1"), *words)
        env = plan["processes"][0]["env"]
        assert {name: env[name] for name in [*NAMES, "MY_PASSWORD"]} == dict.fromkeys([*NAMES, "MY_PASSWORD"], "***")
        assert env["NCCL_DEBUG"] == "INFO"
        text = json.dumps(plan)
    assert SECRET not in text
    assert "shown" in text


@pytest.mark.usefixtures("secrets")
def test_no_secret_is_in_an_error(here):
    for line in (f"WANDB_API_KEY: {SECRET}", f"export JZERO_JOB_ID=TOKEN{SECRET}"):
        here.write(".jzero_env", line)
        assert SECRET not in here.refused("--platform=cpu", "train.py")
    (here.path / ".jzero_env").unlink()
    for name in ("API-KEY", "JZERO_SECRET"):
        said = here.refused("--platform=cpu", f"--export={name}={SECRET}", "train.py")
        assert SECRET not in said
    assert "export JZERO_SECRET" in said
    for config in (
        {"wandb": [{"api_key": SECRET}]}, {"optimizer": {"type": "Adam", "params": {"api_key": SECRET}}},
        {"compiler_options": {"api_key": [SECRET]}}, {"comet": {"api_key": SECRET, "token": SECRET}},
        {"API_KEY": SECRET}, {"secret": {"seed": 1}},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            Config.load(config)
        assert SECRET not in str(error.value)
    assert '{"seed": 1}' in str(error.value)  # only texts are masked


PART = "must have 1 to 63 characters between its dots"
WHOLE = "must have 1 to 253 characters, without spaces and control characters"
HOST_NAMES = {
    "worker..1": PART, f"{'a' * 64}.com": PART, "root@-v": "cannot begin with -", "a\x00b": WHOLE, "a." * 127: WHOLE,
}  # fmt: skip


def test_a_host_name_that_cannot_be_encoded(here):
    """It is refused in one line wherever it is written; others are allowed."""
    cpu = ["--platform", "cpu"]
    good = here.write("good", f"{A} slots=1", "localhost slots=1")
    for name, why in HOST_NAMES.items():
        path = here.hosts("localhost slots=1", f"{name} slots=1")
        options = [["-H", path], *(["-H", good, f"{option}={name}"] for option in ("-i", "--master_addr"))]
        if "\x00" not in name:  # no environment holds it
            here.setenv("SLURM_JOB_NODELIST", name)
            options.append(["--num_gpus", 1])
        for words in options:
            message = here.refused(*cpu, *words, "train.py")
            assert f"a host's name {why}" in message
            assert message.count("\n") == 1
    names = ["worker-1", "root@gpu.example.com", "10.0.0.1", "fe80::1%eth0", "a.b.", "é", "a_b"]
    assert [host_fault(name) for name in names] == [""] * len(names)


TWO = ("--num_nodes", 2, "--num_gpus", 4)


def expanded(word, env):
    """Expand an argument as Kubernetes does."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: env.get(m[1], m[0]) if m[1] else "$", word)


def test_jobset(here, pytestconfig):
    here.setenv("SEEN", "$(X)")
    words = [*TWO, "--grace", 20, "--export", "SEEN", "--export", "SET=b=c", "--max_restarts", 3]
    flags = dict.fromkeys(("one_process_per_node", "module", "no_local_rank", "resume"), True)
    flags |= {"venv_script": "a b", "enable_each_rank_log": "/l$", "hang_timeout": 60, "master_port": 1234}
    words += [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
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
        assert {name: vars(parsed)[name] for name in flags} == flags
        assert parsed.script_args == [*NASTY, "$$(X)", "$(SEEN)"]
        part = here.dry(*rest)
        assert part["coordinator"] == "run-node-0-0.run:1234"
        for theirs, mine in zip(part["processes"], ours, strict=True):
            same = ["rank", "local_rank", "device_ids"]
            assert [theirs[k] for k in same] == [vars(mine)[k] for k in same]


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
        assert yaml.safe_load(kubernetes.to_yaml(value)) == value


def test_kubectl_gets_what_is_printed(here, capsys):
    script = f'echo "$@" > {here.path}/words\ncat > {here.path}/manifest\nexit 3\n'
    here.setenv("PATH", stand_in(here.path, "kubectl", script))
    words = ["--launcher", "k8s", *map(str, TWO), "--launcher_args", "image=i", "--export", "A_TOKEN=b", "train.py"]
    assert cli.main(words) == 3
    assert (here.path / "words").read_text() == "apply -f -\n"
    given = yaml.safe_load((here.path / "manifest").read_text())
    printed, _ = here.manifest(*words[2:])
    assert json.dumps(given).replace('"value": "b"', '"value": "***"') == json.dumps(printed)
