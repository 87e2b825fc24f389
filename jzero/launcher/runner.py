"""Run an attempt: start an agent on every host, check the hosts, start the processes, and bring the agents' messages.

The command and its agents send each other a message every second. So each side notices within 8 seconds that the other
side, or the network between them, has failed; the agent then kills its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

from jzero.launcher import environment
from jzero.launcher.attempt import Attempt
from jzero.launcher.connecting import Connecting
from jzero.launcher.job import Job
from jzero.launcher.link import Link, close_all, unexpected
from jzero.launcher.output import Printer

AGENT_SILENCE = 8.0  # seconds without a message from an agent after which its host counts as lost


class Runner:
    def __init__(self, job: Job):
        self.printer = Printer(lambda: self.attempt.fail(128 + signal.SIGPIPE, "nobody reads the output any more"))
        self.attempt = Attempt(job, self.printer.put, self.tell, self.close_agents)
        self.connecting = Connecting(job, self.attempt.id)

    def links(self) -> list[Link]:
        return list(self.connecting.links.values())

    def tell(self, **message: object) -> None:
        for link in self.links():
            link.tell(**message)

    def close_agents(self) -> None:
        """Close the agents' inputs, so that they kill their processes and end."""
        for link in self.links():
            link.close()

    async def run(self) -> int:
        """Run the attempt to its end; return its exit code.

        Raises:
          ConfigError: the hosts have faults.
        """
        asyncio.get_running_loop().set_exception_handler(self.broke)
        # A command stopped by Ctrl-Z sends no pings, and the agents would end the job.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        attempt, connecting = self.attempt, asyncio.create_task(self.connecting.run(self.attempt.say))
        try:
            while not (connecting.done() or attempt.signalled or attempt.failure):
                await asyncio.wait([connecting], timeout=0.2)
                self.tell(ping=True)
            if attempt.signalled or attempt.failure:
                return attempt.verdict()
            connecting.result()
            self.start()
            listeners = [asyncio.create_task(self.listen(link)) for link in self.links()]
            while attempt.left and any(link.open for link in self.links()):
                done, _ = await asyncio.wait(listeners, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for listener in done:
                    listener.result()  # raise its exception, if any
                self.check()
            await self.clean_up()
            for listener in listeners:
                listener.cancel()
        finally:
            connecting.cancel()
            await asyncio.wait([connecting], timeout=3)  # until then it may add a link
            await close_all(self.links())
            self.printer.end()
        return attempt.verdict()

    def start(self) -> None:
        """Send every agent its processes."""
        connecting, job = self.connecting, self.connecting.job
        o = job.options
        shared = environment.of_attempt(
            o, self.attempt.id, connecting.secret, connecting.address, connecting.port, connecting.bind
        )
        for host, link in connecting.links.items():
            processes = [{"rank": p.rank, "env": p.env | shared, "argv": job.command(p)} for p in job.of(host)]
            link.tell(
                start={
                    "job": self.attempt.id, "cwd": job.cwd, "processes": processes,
                    "logs": o.enable_each_rank_log, "time": time.strftime("%Y%m%d%H%M%S"),
                }
            )  # fmt: skip
            link.heard = time.monotonic()
        self.attempt.started(job)

    async def listen(self, link: Link) -> None:
        """Bring an agent's messages until it ends."""
        while True:
            kind, value = await link.inbox.get()
            if kind == "end":
                # After a signal this command closes the link once the grace is over.
                self.attempt.lose(link.host, link.why(value) if link.lost or not self.attempt.signalled else "")
                return
            self.attempt.receive(kind, value)

    def check(self) -> None:
        """Send pings, and act on silence and on the time."""
        self.tell(ping=True)
        for link in self.links():
            silence = time.monotonic() - link.heard
            if link.open and silence > AGENT_SILENCE:
                self.attempt.fail(1, f"lost {link.host}: no message for {AGENT_SILENCE:g} s", grace=1, silence=silence)
                link.lost = True
                link.close()
        self.attempt.tick()

    def broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End the job after an exception in a callback, such as a signal's; asyncio would print it and go on."""
        if "handle" in context and isinstance(error := context.get("exception"), Exception):
            self.attempt.fail(1, unexpected(error))
        else:
            loop.default_exception_handler(context)

    async def clean_up(self) -> None:
        """Wait for the agents to end; where one died or fell silent, another one kills what it left."""
        self.close_agents()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(link.process.wait() for link in self.links())), 3)
        lost = [link.host for link in self.links() if link.lost]
        for host, swept in zip(lost, await asyncio.gather(*map(self.sweep, lost)), strict=True):
            if not swept:
                self.attempt.say(f"{host} does not answer; its agent should stop its processes without us")

    async def sweep(self, host: str) -> bool:
        """Kill the processes that a lost agent may have left; return whether its host could be reached."""
        try:
            link = await Link.to(self.connecting.job, host)
        except OSError:
            return False
        try:
            hello = await link.answer("hello", 10)
            return "error" not in hello and await link.ask("swept", 10, sweep=self.attempt.id) is True
        finally:
            link.give_up()
