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

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
LONGEST_TEST = 1000
LONGEST_FUNCTION = 70
GROUP_SIZE = 36
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


HIDDEN = re.compile(r"^namespace \{$(.*?)^\} *// namespace$", re.MULTILINE | re.DOTALL)
KEYWORDS = {"int", "bool", "double", "void", "const", "operator", "noexcept"}
NAMES = re.compile(r"^[\w:<].*?\b(\w+)(?=\(|\[|;| =|\{| \{)", re.MULTILINE)
ENUMERATORS = re.compile(r"^enum (?!class\b)[^{;]*\{([^}]*)\}", re.MULTILINE)  # those of an unscoped enumeration
ALIASES = re.compile(r"^using (\w+) = .*;$", re.MULTILINE)


def hidden_names(path):
    """What a source defines in its unnamed namespaces, roughly, with where it is defined: for an alias that is its own text, since the same
    alias may stand twice. Sources that define a name differently cannot be read as one."""
    blocks = HIDDEN.findall(path.read_text())
    defined = {name for block in blocks for name in NAMES.findall(block)} - KEYWORDS
    for block in blocks:
        defined.update(name for body in ENUMERATORS.findall(block) for name in re.findall(r"\bk[A-Z]\w*", body))
    return {name: str(path) for name in defined} | {found[1]: found[0] for block in blocks for found in ALIASES.finditer(block)}


def include_folders(entry):
    words = shlex.split(entry["command"])
    return [word for before, word in zip(words, words[1:]) if word.startswith("-I") or before == "-isystem"]


def groups_of(paths, flags):
    """Sources that clang-tidy reads together, because most of its time goes into libtorch's headers, once for each run of it."""
    groups = []
    for path in paths:
        names, folders = hidden_names(path), include_folders(flags[path])
        for group in groups:
            known = group["names"]
            fits = all(known.get(name, where) == where for name, where in names.items())
            if fits and group["folders"] == folders and len(group["paths"]) < GROUP_SIZE:
                break
        else:
            group = {"names": {}, "folders": folders, "paths": []}
            groups.append(group)
        group["names"] |= names
        group["paths"].append(path)
    return [group["paths"] for group in groups]


def run_tidy(folder, source):
    other_compiler = "--extra-arg=-Wno-unknown-warning-option"  # the build's own flags may name warnings of GCC alone
    all_errors = "--extra-arg=-ferror-limit=0"  # many warnings, which -Werror calls errors, are no reason to stop
    command = ["clang-tidy", "-p", str(folder), "--quiet", f"--header-filter={HEADER_FILTER}", other_compiler, all_errors, str(source)]
    ran = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
    return ran.returncode, ran.stdout


def tidy_group(paths, flags):
    """Reads the group as one source, or one by one where they do not fit together. True if nothing was found, and what was found."""
    folder = ROOT / "build/lint" / "_".join(paths[0].relative_to(ROOT).with_suffix("").parts)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "group.cc"
    source.write_text("".join(f'#include "{path}"\n' for path in paths))
    entry = {**flags, "file": str(source), "command": flags["command"].replace(str(flags["file"]), str(source))}
    (folder / "compile_commands.json").write_text(json.dumps([entry]))
    code, output = run_tidy(folder, source)
    if code and "[clang-diagnostic-error" in output and len(paths) > 1:
        results = [run_tidy(ROOT / "build", path) for path in paths]
        return not any(code for code, _ in results), "".join(output for _, output in results)
    return code == 0, output


def is_test(path, flags):
    """A test, a benchmark, or what only tests use: these come with gcc's precompiled header, which clang cannot read."""
    return path.name.endswith(("_test.cc", "_bench.cc")) or "cmake_pch" in flags[path]["command"]


def tidy(files):
    started = time.monotonic()
    database = json.loads((ROOT / "build/compile_commands.json").read_text())
    flags = {pathlib.Path(entry["file"]).resolve(): entry for entry in database}
    chosen = files or [path for path in sorted(flags) if path.is_relative_to(ROOT / "tessera") and not is_test(path, flags)]
    good = True
    groups = groups_of(chosen, flags)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for paths, (fine, output) in zip(groups, pool.map(lambda paths: tidy_group(paths, flags[paths[0]]), groups)):
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
