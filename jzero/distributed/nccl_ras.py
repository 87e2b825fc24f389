"""Ask NCCL's RAS service what it knows about a job: which ranks are missing, hang or differ in their collectives.

NCCL 2.24 and later start the service in every process; it listens on one port of each host and answers lines of text
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

DEFAULT = "localhost:28028"
MOST = 16_384  # bytes of an answer; one of a large job would hide the stacks


def status(env: Mapping[str, str] = os.environ, timeout: float = 5.0) -> str:
    """Return the service's answer to VERBOSE STATUS, or one line that says why there is none.

    Args:
      env: NCCL_RAS_ADDR has the service's address, as host:port; NCCL_RAS_ENABLE=0 turns it off.
      timeout: seconds to wait for all of the answer; after that what has come is returned.
    """
    address = env.get("NCCL_RAS_ADDR", DEFAULT)
    if env.get("NCCL_RAS_ENABLE") == "0":
        return "NCCL's RAS service is off (NCCL_RAS_ENABLE=0)"
    host, _, port = address.rpartition(":")
    end, answer, why = time.monotonic() + timeout, b"", "it closed the connection"
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout) as connection:
            connection.sendall(b"VERBOSE STATUS\n")
            while len(answer) < MOST:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (data := connection.recv(4096)):
                    break
                answer += data
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
    text = answer[:MOST].decode(errors="replace").strip()
    return (
        f"NCCL's RAS service at {address}:\n{text}"
        if text
        else f"NCCL's RAS service at {address} did not answer: {why}"
    )
