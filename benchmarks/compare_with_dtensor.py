#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds `tessera train --compare` against the same model on PyTorch's DTensor, on the same machine in the same minutes.

Runs them in turns, keeps the best tokens/s of each, prints the ratios and writes benchmark rows. The interpreter must have torch.
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", default=str(ROOT / "build/bin/tessera"))
    parser.add_argument("--model", default="llama-19m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["gloo", "shm"])
    parser.add_argument("--text", help="a text to train on [random words]")
    parser.add_argument("--json", help="file that gets the benchmark rows")
    return parser.parse_args()


def random_words(path):
    words = "in the beginning god created heaven and earth waters light darkness day night evening morning".split()
    choose = random.Random(1)
    path.write_text(" ".join(choose.choice(words) for _ in range(100000)))
    return str(path)


def sizes(arguments):
    return ["--model", arguments.model, "--ranks", str(arguments.ranks), "--batch", str(arguments.batch), "--seq", str(arguments.seq)]


def run(command):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return done.stdout


def run_tessera(arguments, backend, text, rows_path):
    run([arguments.tessera, "train", "--compare", "--data", text, "--backend", backend, "--steps", str(arguments.steps),
         "--json", str(rows_path), *sizes(arguments)])
    rows = {row["name"]: row["value"] for row in json.loads(rows_path.read_text())}
    speeds = {name.split("/")[1]: value for name, value in rows.items() if name.endswith("/tokens_per_s")}
    return {f"tessera {backend} {mode}": value for mode, value in speeds.items()}


def run_peer(arguments, gradients):
    windows = max((arguments.steps - 5) // 5, 1)  # as many as `--compare` times
    out = run([sys.executable, str(ROOT / "benchmarks/peers/dtensor_train.py"), "--gradients", gradients, "--windows", str(windows),
               *sizes(arguments)])
    return {f"dtensor gloo {gradients}": json.loads(out.strip().splitlines()[-1])["tokens_per_s"]}


def measure(arguments):
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        text = arguments.text or random_words(pathlib.Path(folder) / "words.txt")
        for turn in range(arguments.rounds):
            results = {}
            for backend in arguments.backends:
                results.update(run_tessera(arguments, backend, text, pathlib.Path(folder) / "rows.json"))
            for gradients in ("implicit", "replicate"):
                results.update(run_peer(arguments, gradients))
            for name, value in results.items():
                best[name] = max(best.get(name, 0), value)
            print(f"turn {turn + 1}/{arguments.rounds}: " + ", ".join(f"{name} {value:.0f}" for name, value in results.items()), flush=True)
    return best


def ratios(arguments, best):
    pairs = []
    for backend in arguments.backends:
        implicit = f"tessera {backend} kImplicit"
        pairs += [(name, implicit) for name in best if name.startswith(f"tessera {backend} ") and name != implicit]
    if "gloo" in arguments.backends:
        pairs += [("tessera gloo kImplicit", f"dtensor gloo {gradients}") for gradients in ("implicit", "replicate")]
        pairs += [("tessera gloo kReduceScatter", "dtensor gloo replicate")]
    return [(name, against, best[name] / best[against]) for name, against in pairs]


def main():
    arguments = parse_arguments()
    best = measure(arguments)
    print(f"\n{arguments.model}, {arguments.ranks} ranks with one thread each, {arguments.batch} x {arguments.seq} tokens per rank and step")
    rows = []
    for name, value in best.items():
        print(f"{name:32} {value:10.0f} tokens/s")
        rows.append({"name": f"compare/{name}", "value": value, "unit": "tokens/s", "against": None, "ratio": None})
    print()
    for name, against, ratio in ratios(arguments, best):
        print(f"{name:32} {ratio:6.3f} x {against}")
        rows.append({"name": f"compare/{name} to {against}", "value": ratio, "unit": "ratio", "against": f"compare/{against}", "ratio": ratio})
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
