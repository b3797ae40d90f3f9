#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the installed package, and of the program in README.md.

  consumer_test.py --source ROOT --build BUILD install|program|build|build-readme|run-readme
"""
import argparse
import math
import pathlib
import re
import shutil
import subprocess
import sys

# Private to the library: its users configure without them.
HIDDEN_PACKAGES = ("fmt", "spdlog", "nlohmann_json", "CLI11", "GTest", "benchmark")
RANKS = (1, 2, 4)


def run(*command, **options):
    command = [str(part) for part in command]
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, check=True, text=True, **options)


def readme_program(text):
    """The first C++ block of the README that has a main function."""
    for block in re.findall(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "int main(" in block:
            return block
    raise SystemExit("README.md: no C++ block with a main function in it")


def losses(output, rank_prefix):
    """What one rank printed: the lines 'step N loss X' behind its prefix."""
    found = re.findall(rf"^(?:{rank_prefix})?step (\d+) loss (\S+)$", output, re.MULTILINE)
    return [(int(step), float(value)) for step, value in found]


def alike(one, other):
    """Equal to six digits, up to one unit of the last: the sums' order differs, and may fall on either side of a rounding."""
    if [step for step, _ in one] != [step for step, _ in other]:
        return False
    return all(abs(a - b) <= 1.01 * 10 ** (math.floor(math.log10(max(abs(a), 1e-30))) - 5) for (_, a), (_, b) in zip(one, other))


class Consumer:
    def __init__(self, source, build):
        self.source, self.build = source.resolve(), build.resolve()
        self.work = self.build / "consumer"
        self.prefix = self.work / "prefix"

    def install(self):
        shutil.rmtree(self.prefix, ignore_errors=True)
        run("cmake", "--install", self.build, "--prefix", self.prefix, stdout=subprocess.DEVNULL)
        headers = sorted(path.relative_to(self.prefix / "include").as_posix() for path in self.prefix.glob("include/**/*.h"))
        print("\n".join(headers))
        if "tessera/tessera.h" not in headers:
            raise SystemExit("the installed tree lacks tessera/tessera.h")

    def program(self):
        output = run(self.prefix / "bin/tessera", "--version", stdout=subprocess.PIPE).stdout
        if not re.match(r"tessera \d+\.\d+\.\d+$", output):
            raise SystemExit(f"tessera --version printed {output!r}, expected a version")

    def compile(self, program, folder):
        hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in HIDDEN_PACKAGES]
        shutil.rmtree(self.work / folder, ignore_errors=True)
        run("cmake", "-S", self.source / "tests/consumer", "-B", self.work / folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DPROGRAM={program}", f"-DCMAKE_PREFIX_PATH={self.prefix}", *hidden)
        run("cmake", "--build", self.work / folder)

    def build_small(self):
        self.compile(self.source / "tests/consumer/small.cc", "small")
        output = run(self.work / "small/consumer", stdout=subprocess.PIPE).stdout
        if output != "small: one program, expected; go on\n":
            raise SystemExit(f"the consumer printed {output!r}")

    def build_readme(self):
        program = self.work / "readme.cc"
        program.write_text(readme_program((self.source / "README.md").read_text()))
        self.compile(program, "readme")

    def run_readme(self):
        """The program prints the same losses to six digits from every rank of every world."""
        expected = None
        for ranks in RANKS:
            output = run(self.build / "bin/tessera", "run", "-n", ranks, "--", self.work / "readme/consumer", stdout=subprocess.PIPE).stdout
            for rank in range(ranks):
                got = losses(output, rf"\[{rank}\] ")
                if len(got) < 5:
                    raise SystemExit(f"rank {rank} of {ranks} printed {len(got)} losses, expected at least 5; all output:\n{output}")
                expected = expected or got
                if not alike(got, expected):
                    raise SystemExit(f"rank {rank} of {ranks} printed\n{got}\nexpected, as rank 0 of 1:\n{expected}")
        print(f"{len(expected)} losses alike on {RANKS} ranks: {expected[0][1]} ... {expected[-1][1]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("step", choices=["install", "program", "build", "build-readme", "run-readme"])
    options = parser.parse_args()
    consumer = Consumer(options.source, options.build)
    consumer.work.mkdir(exist_ok=True)
    steps = {
        "install": consumer.install,
        "program": consumer.program,
        "build": consumer.build_small,
        "build-readme": consumer.build_readme,
        "run-readme": consumer.run_readme,
    }
    try:
        steps[options.step]()
    except subprocess.CalledProcessError as error:
        print(f"exit {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr)
        if error.stdout:
            print(error.stdout)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
