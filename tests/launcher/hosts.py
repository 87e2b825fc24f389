"""Two hosts on one machine: network namespaces with their own addresses, names, process tables and sshd."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

NEEDS = "needs root, iproute2 and openssh-server"


def can_run():
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")))


def sh(*words):
    subprocess.run([str(word) for word in words], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class Hosts:
    """Hosts a and b; commands run on a. `options` are for ssh."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.servers = folder, {}
        self.names = {h: f"jz{number}{h}" for h in "ab"}  # of both the namespaces and the hosts
        self.addresses = {"a": f"10.{100 + number}.0.1", "b": f"10.{100 + number}.0.2"}
        self.options = f"-F {folder}/config"
        folder.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "user"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        options = (f"IdentityFile {folder}/user", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null")
        (folder / "config").write_text("\n ".join(["Host *", *options, "LogLevel ERROR\n"]))
        self.remove()
        for name in self.names.values():
            sh("ip", "netns", "add", name)
            sh("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            etc = Path("/etc/netns", name)
            etc.mkdir(parents=True, exist_ok=True)
            lines = [f"{self.addresses[h]} {self.names[h]}\n" for h in "ab"]
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        a, b = self.names.values()
        sh("ip", "link", "add", "net", "netns", a, "type", "veth", "peer", "name", "net", "netns", b)
        for host, name in self.names.items():
            sh("ip", "netns", "exec", name, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "net")
            sh("ip", "netns", "exec", name, "ip", "link", "set", "net", "up")
            self.serve(host)

    def serve(self, host):
        """Start the host's sshd, whose shells have an empty home.

        Root's own .bashrc may do anything: pyenv's writes a lock, which a shell that is killed leaves to all others.
        """
        config = self.folder / f"sshd_{host}"
        (self.folder / "home").mkdir(exist_ok=True)
        config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\nStrictModes no\n"
            f"PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nSetEnv HOME={self.folder}/home\n"
        )
        inner = f"hostname {self.names[host]}; exec /usr/sbin/sshd -D -f {config}"
        isolated = ["unshare", "--uts", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", inner]
        self.servers[host] = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *isolated], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.wait_for(host)

    def wait_for(self, host):
        end = time.monotonic() + 30
        while subprocess.run([*self.on("a"), *self.ssh(host), "true"], capture_output=True).returncode:
            assert time.monotonic() < end, f"sshd on {host} does not answer"
            time.sleep(0.1)

    def ssh(self, host):
        return ["ssh", *self.options.split(), self.names[host]]

    def on(self, host):
        """A command prefix that runs a command in this host's network and under its name."""
        name = self.names[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]

    def link(self, state):
        """Set b's network "up" or "down".

        Up: wait until a finds b again. While b was gone, connections that retry may have left a search for its address
        that is about to fail, and a new connection would fail with it ("No route to host").
        """
        sh("ip", "netns", "exec", self.names["b"], "ip", "link", "set", "net", state)
        if state == "up":
            self.wait_for("b")

    def stop(self, host):
        os.killpg(self.servers[host].pid, signal.SIGKILL)
        self.servers.pop(host).wait()

    def remove(self):
        for host in list(self.servers):
            self.stop(host)
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
