"""One of several processes that sum messages of several sizes; the first prints the time of each, as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from splitfg.distributed import connect


def main() -> None:
    ranks = connect(device="cpu", timeout=timedelta(minutes=5))
    for text in sys.argv[1:]:
        case = json.loads(text)
        values = torch.zeros(case["bytes"] // 4)
        times = []
        for i in range(case["repeats"] + 1):
            dist.barrier()
            begin = time.perf_counter()
            ranks.sum_(values)
            times += [time.perf_counter() - begin] if i else []
        if ranks.is_first:
            found = {"ranks": ranks.size, "ms": round(1e3 * statistics.median(times), 2)}
            print(json.dumps(case | found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
