#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ranks on two hosts that are network namespaces of this machine, joined by one cable.

Usage: hosts_test.py COMM_TEST. Needs root and ip (iproute2); skips (code 77) where namespaces are not allowed.
"""
import os
import subprocess
import sys

SKIPPED = 77
LAYOUTS = (("a", "b"), ("a", "a", "b"), ("a", "b", "a", "b"), ("a", "a", "a", "b", "b"))


def sh(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)


class Hosts:
    """Two namespaces, "a" at 10.77.0.1 and "b" at 10.77.0.2."""

    def __init__(self):
        self.names = {letter: f"tessera-{os.getpid()}-{letter}" for letter in "ab"}

    def __enter__(self):
        for name in self.names.values():
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "cable", "netns", self.names["a"], "type", "veth", "peer", "name", "cable", "netns", self.names["b"])
        for number, name in enumerate(self.names.values(), 1):
            inside = ("ip", "netns", "exec", name, "ip")
            sh(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            sh(*inside, "link", "set", "cable", "up")
            sh(*inside, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for name in self.names.values():
            subprocess.run(("ip", "netns", "del", name), check=False)

    def start(self, letter, environment, *command):
        script = f'hostname host-{letter} && exec "$@"'
        return subprocess.Popen(("ip", "netns", "exec", self.names[letter], "unshare", "--uts", "sh", "-c", script, "sh", *command),
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def variables(layout, rank, port):
    return dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(layout)), LOCAL_RANK=str(layout[:rank].count(layout[rank])),
                MASTER_ADDR="10.77.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")


def run(hosts, program, layout, port):
    ranks = [hosts.start(letter, variables(layout, rank, port), program, "--gtest_also_run_disabled_tests",
                         "--gtest_filter=RankBody.DISABLED_OnHosts")
             for rank, letter in enumerate(layout)]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
    for rank in failed:
        print(f"--- rank {rank} on host {layout[rank]} of {layout}, code {ranks[rank].returncode}\n{outputs[rank]}")
    return not failed


def main():
    try:
        sh("ip", "netns", "add", f"tessera-{os.getpid()}-probe")
        sh("ip", "netns", "del", f"tessera-{os.getpid()}-probe")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: network namespaces cannot be made here ({error})")
        return SKIPPED
    with Hosts() as hosts:
        passed = [run(hosts, sys.argv[1], layout, 29500 + number) for number, layout in enumerate(LAYOUTS)]
    print(f"{sum(passed)} of {len(passed)} layouts of ranks on two hosts agree with the plain model")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
