"""Where processes of a run meet."""

import socket

import torch.distributed as dist


def open_store(host: str) -> dist.TCPStore:
    """A store that listens at this address of ours alone: torch by itself would listen at all of them."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
