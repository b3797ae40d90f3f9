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
import re
import shlex
import subprocess
import sys
import time

import source_groups

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
LONGEST_TEST = 1000
LONGEST_FUNCTION = 70
GROUP_SIZE = 90
HEADER_FILTER = r"/tessera/[a-z]+/(mpi/)?[a-z0-9_]+[.](h|cc)$"
LICENCE = "SPDX-License-Identifier: Apache-2.0"


def sources(patterns=("*.h", "*.cc")):
    folders = [ROOT / "tessera", ROOT / "tests"]
    return sorted(path for folder in folders for pattern in patterns for path in folder.rglob(pattern))


def long_functions(path, lines):
    """Formatted code at namespace level: a body opens with a line at column 0 and closes with a '}' at column 0."""
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("}"):
            is_table = line.startswith("};")
            if start and not is_table and number - start + 1 > LONGEST_FUNCTION:
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
    longest = LONGEST_TEST if path.name.endswith("_test.cc") else LONGEST_FILE
    if len(lines) > longest:
        complaints.append(f"{path}: {len(lines)} lines, at most {longest}; split it")
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


def include_folders(entry):
    words = shlex.split(entry["command"])
    return [word for before, word in zip(words, words[1:]) if word.startswith("-I") or before == "-isystem"]


def groups_of(paths, flags):
    """Sources that clang-tidy reads together, because most of its time goes into libtorch's headers, once for each run of it."""
    return source_groups.groups_of(paths, kind=lambda path: include_folders(flags[path]), size=lambda path: 1, limit=GROUP_SIZE)


UNITY_INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)


def flags_by_source(database):
    """Each source's entry of compile_commands.json. A source that TESSERA_UNITY has made of several stands there for them."""
    flags = {}
    for entry in database:
        path = pathlib.Path(entry["file"]).resolve()
        if path.parent.name == "Unity":
            parts = [pathlib.Path(name) for name in UNITY_INCLUDE.findall(path.read_text())]
            flags.update({part: {**entry, "file": str(part), "command": entry["command"].replace(str(path), str(part))} for part in parts})
        else:
            flags[path] = entry
    return flags


def run_tidy(folder, source):
    other_compiler = "--extra-arg=-Wno-unknown-warning-option"  # the build's own flags may name warnings of GCC alone
    all_errors = "--extra-arg=-ferror-limit=0"  # many warnings, which -Werror calls errors, are no reason to stop
    command = ["clang-tidy", "-p", str(folder), "--quiet", f"--header-filter={HEADER_FILTER}", other_compiler, all_errors, str(source)]
    ran = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    return ran.returncode, ran.stdout


def tidy_group(paths, flags):
    """Reads the group as one source, or its halves where they do not fit together. True if nothing was found, and what was found."""
    folder = ROOT / "build/lint" / "_".join(paths[0].relative_to(ROOT).with_suffix("").parts)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "group.cc"
    source.write_text("".join(f'#include "{path}"\n' for path in paths))
    entry = flags[paths[0]]
    entry = {**entry, "file": str(source), "command": entry["command"].replace(str(entry["file"]), str(source))}
    (folder / "compile_commands.json").write_text(json.dumps([entry]))
    code, output = run_tidy(folder, source)
    if code and "[clang-diagnostic-error" in output and len(paths) > 1:
        middle = len(paths) // 2
        results = [tidy_group(half, flags) for half in (paths[:middle], paths[middle:])]
        return all(fine for fine, _ in results), "".join(output for _, output in results)
    return code == 0, output


def is_test(path, flags):
    """A test, a benchmark, or what only tests use: these come with gcc's precompiled header, which clang cannot read."""
    return path.name.endswith(("_test.cc", "_bench.cc")) or "cmake_pch" in flags[path]["command"]


def tidy(files):
    started = time.monotonic()
    database = json.loads((ROOT / "build/compile_commands.json").read_text())
    flags = flags_by_source(database)
    chosen = files or [path for path in sorted(flags) if path.is_relative_to(ROOT / "tessera") and not is_test(path, flags)]
    good = True
    groups = groups_of(chosen, flags)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for paths, (fine, output) in zip(groups, pool.map(lambda paths: tidy_group(paths, flags), groups)):
            good = good and fine
            print("ok    " if fine else "FAILED", " ".join(str(path.relative_to(ROOT / "tessera")) for path in paths), flush=True)
            if not fine:
                print(output)
    print(f"{len(chosen)} sources in {len(groups)} runs, {time.monotonic() - started:.0f} s")
    return good


def main():
    kinds = {"format": format_check, "tidy": tidy}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        raise SystemExit(__doc__)
    files = [pathlib.Path(name).resolve() for name in sys.argv[2:]]
    return 0 if kinds[sys.argv[1]](files) else 1


if __name__ == "__main__":
    sys.exit(main())
