"""Where the ranks of one machine meet: a key-value store in the process that starts them.

Not in rank 0, which may die, and not in a file, in which a rank that is killed while it writes would leave half an
entry: whoever reads that waits for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

RENDEZVOUS_VARIABLE = "LMKIT_RENDEZVOUS"
"""Tells a rank the address that `hosted_store` yields."""


@contextmanager
def hosted_store() -> Iterator[str]:
    """Host a store for ranks on this machine; yields its address, "127.0.0.1:PORT".

    Only this machine reaches it, and no port can be taken: the system picks a free one.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(socket.SOMAXCONN)
        host, port = listening.getsockname()
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    yield f"{host}:{store.port}"


def join_store(address: str, timeout_s: float) -> dist.Store:
    """The store of `hosted_store`, for a rank.

    Raises:
        torch.distributed.DistError: nobody hosts it.
    """
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
