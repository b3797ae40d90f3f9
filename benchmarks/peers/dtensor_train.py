#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Llama of `tessera train` on PyTorch's own DTensor: the peer that kImplicit is held against.

Data-parallel over gloo, one thread per rank: batch Shard(0), parameters Replicate, AdamW, clip by the global norm. With --gradients implicit
they stay Partial and whoever reads them reduces them, as in kImplicit; with replicate each is all-reduced first. Sizes are those of the presets.
Starts its ranks itself; rank 0 prints one line of JSON.
"""
import argparse
import json
import os
import socket
import subprocess
import sys
import time

def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama-3m", "llama-19m"], default="llama-19m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="rows per rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--windows", type=int, default=6, help="timed windows; the best counts")
    parser.add_argument("--window", type=int, default=5, help="steps per window")
    parser.add_argument("--optimizer", choices=["fused", "foreach", "loop"], default="fused")
    parser.add_argument("--gradients", choices=["implicit", "replicate"], default="implicit")
    parser.add_argument("--attention", choices=["math", "sdpa"], default="math",
                        help="math: written out, since DTensor has no rule for the fused one on CPU before 2.14")
    return parser.parse_args()


def start_ranks(ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    processes = [subprocess.Popen([sys.executable, *sys.argv], env=dict(common, RANK=str(rank), LOCAL_RANK=str(rank)))
                 for rank in range(ranks)]
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


def train(arguments):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
    from llama import PRESETS, Llama

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    torch.manual_seed(0)
    config = PRESETS[arguments.model]
    model = Llama(config, arguments.seq, arguments.attention)
    distribute_module(model, mesh)
    kind = {"fused": dict(fused=True), "foreach": dict(foreach=True), "loop": dict(foreach=False)}[arguments.optimizer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), **kind)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(0, config["vocab_size"], (arguments.batch, arguments.seq + 1), generator=generator)
    tokens, targets = (DTensor.from_local(part.contiguous(), mesh, [Shard(0)], run_check=False) for part in (rows[:, :-1], rows[:, 1:]))

    def step():
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        if arguments.gradients == "replicate":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.redistribute(mesh, [Replicate()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.full_tensor().item()

    for _ in range(arguments.warmup_steps):
        step()
    best = float("inf")
    for _ in range(arguments.windows):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(arguments.window):
            loss = step()
        best = min(best, (time.perf_counter() - start) / arguments.window)
    if dist.get_rank() == 0:
        tokens_per_s = arguments.ranks * arguments.batch * arguments.seq / best
        print(json.dumps({"model": arguments.model, "ranks": arguments.ranks, "gradients": arguments.gradients, "torch": torch.__version__, "step_ms": best * 1e3,
                          "tokens_per_s": tokens_per_s, "loss": loss, "parameters": sum(p.numel() for p in model.parameters())}))
    dist.barrier()
    dist.destroy_process_group()


def main():
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        return start_ranks(arguments.ranks)
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
