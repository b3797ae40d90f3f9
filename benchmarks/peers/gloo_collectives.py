#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gloo's collectives of float32 as PyTorch offers them in Python: rows of JSON for `tessera bench collectives --peer`.

Usage: gloo_collectives.py [RANKS]. The interpreter must have torch.
"""
import json
import os
import socket
import sys
import time

def text_of(size):
    return f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB"


def calls(torch, dist, size, ranks):
    part = size // 4 // ranks
    whole, other, own = torch.ones(part * ranks), torch.ones(part * ranks), torch.ones(part)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(other, own),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }


def least_us(dist, call, size):
    least = float("inf")
    for _ in range(max(7, min(100, (128 << 20) // size))):
        dist.barrier()
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least * 1e6


def run(rank, ranks, port):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    rows = []
    for size in (1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20):
        for kind, call in calls(torch, dist, size, ranks).items():
            rows.append({"name": f"{kind}/{text_of(size)}", "value": least_us(dist, call, size)})
    dist.destroy_process_group()
    return rows


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            run(rank, ranks, port)
            os._exit(0)
        children.append(child)
    rows = run(0, ranks, port)
    for child in children:
        os.waitpid(child, 0)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
