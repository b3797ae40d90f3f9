#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks at the sources, changes nothing.

  lint.py format [FILES...]    clang-format, the licence line, lengths of files and lines, by default for every source
  lint.py tidy [FILES...]      clang-tidy, by default for the sources of the library and the program; needs a configured build/
"""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
LONGEST_FUNCTION = 70
LICENCE = "SPDX-License-Identifier: Apache-2.0"


def sources(patterns=("*.h", "*.cc")):
    folders = [ROOT / "tessera", ROOT / "tests"]
    return sorted(path for folder in folders for pattern in patterns for path in folder.rglob(pattern))


def long_functions(path, lines):
    """Formatted code at namespace level: a body opens with a line at column 0 and closes with a '}' at column 0."""
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("}"):
            if start and number - start + 1 > LONGEST_FUNCTION:
                yield f"{path}:{start}: {number - start + 1} lines in one function, at most {LONGEST_FUNCTION}"
            start = None
        elif line[:1].isalpha() and not line.startswith(("namespace", "class", "struct", "enum", "union", "extern", "using", "typedef")):
            start = start or number
        if start and line.endswith(";") and line[:1].isalpha():
            start = None


def check_text(path):
    lines = path.read_text().splitlines()
    complaints = []
    if not any(LICENCE in line for line in lines[:2]):
        complaints.append(f"{path}: its first line lacks '{LICENCE}'")
    if len(lines) > LONGEST_FILE:
        complaints.append(f"{path}: {len(lines)} lines, at most {LONGEST_FILE}; split it")
    if path.suffix in (".h", ".cc"):
        complaints.extend(long_functions(path, lines))
    return complaints


def format_check(files):
    scripts = sources(("*.py", "CMakeLists.txt", "*.cmake"))
    complaints = [text for path in (files or sources() + scripts) for text in check_text(path)]
    code = [path for path in (files or sources()) if path.suffix in (".h", ".cc")]
    for path in code:
        formatted = subprocess.run(["clang-format", str(path)], check=True, text=True, capture_output=True).stdout
        if formatted != path.read_text():
            complaints.append(f"{path}: not formatted; run clang-format -i on it")
    print("\n".join([*complaints, f"{len(code)} sources looked at"]))
    return not complaints


def tidy_one(path):
    command = ["clang-tidy", "-p", str(ROOT / "build"), "--quiet", str(path)]
    ran = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    return path, ran.returncode, ran.stdout


def tidy(files):
    database = json.loads((ROOT / "build/compile_commands.json").read_text())
    compiled = {pathlib.Path(entry["file"]).resolve() for entry in database}
    tests = ("_test.cc", "_bench.cc")
    chosen = files or [path for path in sorted(compiled) if path.is_relative_to(ROOT / "tessera") and not path.name.endswith(tests)]
    good = True
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, code, output in pool.map(tidy_one, chosen):
            good = good and code == 0
            print("ok    " if code == 0 else "FAILED", path.relative_to(ROOT), flush=True)
            if code:
                print(output)
    return good


def main():
    kinds = {"format": format_check, "tidy": tidy}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        raise SystemExit(__doc__)
    files = [pathlib.Path(name).resolve() for name in sys.argv[2:]]
    return 0 if kinds[sys.argv[1]](files) else 1


if __name__ == "__main__":
    sys.exit(main())
