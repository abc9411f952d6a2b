"""``python -m benchmarks._switch``: several processes, each in a network of its own, with slow links between them.

Every process has a network namespace with a TUN device. This program is the switch between them: it takes every packet,
holds it back for as long as the sender's link takes to send it and for the latency, and hands it to its receiver. Real
TCP runs over it. Needs ``unshare --map-root-user --net --fork``, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_MTU = 9000
_SOON_S = 2e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bandwidth", type=float, required=True, help="bit/s of every link, in each direction")
    parser.add_argument("--latency", type=float, required=True, help="seconds for one way")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    switch, processes = Switch(args.bandwidth, args.latency), []
    for rank in range(args.ranks):
        switch.ports.append(open_network(rank))
        processes.append(start(args.command, rank, args.ranks))
    switch.run(processes)
    sys.exit(max(process.returncode for process in processes))


def open_network(rank: int) -> int:
    """Move this program to a new network with the address 10.0.0.(rank + 1), and return the file of its device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", b"wire", _TUN_WITHOUT_HEADER))
    for line in (
        "link set lo up",
        f"addr add 10.0.0.{rank + 1}/24 dev wire",
        f"link set wire mtu {_MTU} up",
        "link set wire txqueuelen 5000",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    # connections that were idle between two steps would begin slowly again
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0", encoding="ascii")
    return device


def start(command: Sequence[str], rank: int, ranks: int) -> subprocess.Popen[bytes]:
    """Start a process of the group in the present network; only the first one prints."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
    options = {"GLOO_SOCKET_IFNAME": "wire", "TP_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(list(command), env=os.environ | place | options)


@dataclass
class Switch:
    """Forwards packets between devices, late."""

    bandwidth: float
    latency: float
    ports: list[int] = field(default_factory=list)
    _waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _count: int = 0

    def run(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Forward packets until all processes have ended."""
        selector, free = selectors.DefaultSelector(), [0.0] * len(self.ports)
        for sender, port in enumerate(self.ports):
            selector.register(port, selectors.EVENT_READ, sender)
        while any(process.poll() is None for process in processes):
            for _ in range(50):  # asking for the processes takes longer than a packet
                for key, _events in selector.select(self._patience()):
                    self._take(key.fd, key.data, free)
                self._deliver()

    def _take(self, port: int, sender: int, free: list[float]) -> None:
        for _ in range(32):
            try:
                packet = os.read(port, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            free[sender] = max(time.monotonic(), free[sender]) + 8 * len(packet) / self.bandwidth
            self._count += 1
            heapq.heappush(self._waiting, (free[sender] + self.latency, self._count, packet[19] - 1, packet))

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, receiver, packet = heapq.heappop(self._waiting)
            if receiver < len(self.ports):
                try:
                    os.write(self.ports[receiver], packet)
                except BlockingIOError:
                    continue  # TCP sends it again

    def _patience(self) -> float:
        if not self._waiting:
            return 0.01
        left = self._waiting[0][0] - time.monotonic()
        return max(0.0, left - _SOON_S)  # a select that waits may wake up late


if __name__ == "__main__":
    main()
