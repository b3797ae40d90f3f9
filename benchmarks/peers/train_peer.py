#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Llama of `tessera train` under PyTorch's own data parallelism: a peer for `tessera bench train --peer`.

One rank of a job, or alone where RANK is not set: then the plain model and AdamW. Over gloo, one thread. Every line of standard input is a number
of steps; the answer is a line of JSON with the seconds that they took. See docs/performance.md.
"""
import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from llama import PRESETS, Llama

KINDS = {
    "ddp": "DistributedDataParallel, AdamW on every rank",
    "ddp-zero": "DistributedDataParallel, ZeroRedundancyOptimizer",
    "fsdp2": "fully_shard per layer, resharded after forward (stage 3)",
    "fsdp2-keep": "fully_shard per layer, parameters kept until the backward is over (stage 2)",
}
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce", "broadcast")


def parse_arguments():
    kinds = "\n".join(f"  {name:11} {text}" for name, text in KINDS.items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\nkinds:\n{kinds}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--model", default="llama-3m", help=f"{', '.join(PRESETS)}, or a JSON file of sizes")
    parser.add_argument("--data", required=True, help="a text; its bytes are the tokens")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--optimizer", choices=["fused", "foreach", "loop"], default="fused")
    parser.add_argument("--attention", choices=["sdpa", "math"], default="sdpa")
    return parser.parse_args()


class BlockedTime:
    """Seconds that this thread spent in collectives called from Python, and in waiting for them."""

    def __init__(self):
        self.seconds = 0.0
        self.inside = False
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self.timed(getattr(dist, name)))
        dist.Work.wait = self.timed(dist.Work.wait)

    def timed(self, function):
        def call(*arguments, **options):
            if self.inside:
                return function(*arguments, **options)
            self.inside = True
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start
                self.inside = False
        return call


class Rows:
    """Rows of the text at places of this rank's own choice."""

    def __init__(self, path, batch, sequence, rank):
        with open(path, "rb") as file:
            self.bytes = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        self.batch, self.sequence = batch, sequence
        self.choice = torch.Generator().manual_seed(rank)

    def next(self):
        places = torch.randint(0, self.bytes.numel() - self.sequence, (self.batch, 1), generator=self.choice)
        rows = self.bytes[places + torch.arange(self.sequence + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Trainer:
    def __init__(self, arguments, ranks, rank):
        self.clip = arguments.clip
        self.blocked = BlockedTime()
        self.rows = Rows(arguments.data, arguments.batch, arguments.seq, rank)
        torch.manual_seed(0)
        config = PRESETS.get(arguments.model) or json.load(open(arguments.model))
        self.module = self.model = Llama(config, arguments.seq, arguments.attention)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.ddp = None
        if ranks > 1:
            self.distribute(arguments.kind)
        self.optimizer = self.make_optimizer(arguments, ranks)

    def distribute(self, kind):
        if kind.startswith("ddp"):
            self.module = self.ddp = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.ddp._set_ddp_runtime_logging_sample_rate(1)  # its timers tell which communication was hidden
            return
        from torch.distributed.fsdp import fully_shard
        for layer in (*self.model.layers, self.model):
            fully_shard(layer, reshard_after_forward=kind == "fsdp2")

    def make_optimizer(self, arguments, ranks):
        kernel = {"fused": dict(fused=True), "foreach": dict(foreach=True), "loop": dict(foreach=False)}[arguments.optimizer]
        options = dict(lr=arguments.lr, weight_decay=arguments.weight_decay, betas=(0.9, 0.95), **kernel)
        if ranks > 1 and arguments.kind == "ddp-zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer
            return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **options)
        return torch.optim.AdamW(self.model.parameters(), **options)

    def reducer_times(self):
        """Exposed and hidden seconds of DDP's all-reduces, of the last backward that it has summed up."""
        if self.ddp is None:
            return 0.0, 0.0
        log = self.ddp._get_ddp_logging_data()
        hidden = log.get("backward_compute_comm_overlap_time", 0)
        return (log.get("backward_comm_time", 0) - hidden) * 1e-9, hidden * 1e-9

    def step(self, sums):
        start, blocked = time.perf_counter(), self.blocked.seconds
        self.optimizer.zero_grad()
        loss = self.module(*self.rows.next())
        loss.backward()
        self.loss = loss.item()
        middle, blocked_before = time.perf_counter(), self.blocked.seconds
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        end, blocked_after = time.perf_counter(), self.blocked.seconds
        exposed, hidden = self.reducer_times()
        sums["forward_backward"] += middle - start - (blocked_before - blocked) - exposed
        sums["communication"] += blocked_after - blocked + exposed
        sums["hidden"] += hidden
        sums["optimizer"] += end - middle - (blocked_after - blocked_before)

    def block(self, steps):
        sums = dict(seconds=0.0, forward_backward=0.0, communication=0.0, hidden=0.0, optimizer=0.0)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(sums)
        sums["seconds"] = time.perf_counter() - start
        return dict(sums, loss=self.loss, peak_mib=peak_mib())


def peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


def answer(**fields):
    print(json.dumps(fields), flush=True)


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if ranks > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(arguments, ranks, rank)
    answer(parameters=trainer.parameters)
    for line in sys.stdin:
        answer(**trainer.block(int(line)))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
