#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the includes of every source under tessera/ and reports those that break the order of the rooms.

  check_includes.py ROOT

- A file includes its own room and the rooms before it (the order stands in ROOT/CMakeLists.txt), never one after it.
- A public header (PUBLIC_HEADERS of its room) includes public headers only, and no library that the package does not require.
- Headers of the project are included as <tessera/room/name.h>, and they exist.
"""
import pathlib
import re
import sys

# What a consumer of the installed package need not have.
PRIVATE_LIBRARIES = ("fmt/", "spdlog/", "gloo/", "nlohmann/", "CLI/", "gtest/", "gmock/", "benchmark/")
UMBRELLA = "tessera/tessera.h"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def room_order(root):
    match = re.search(r"set\(TESSERA_ROOMS\s+([^)]*)\)", (root / "CMakeLists.txt").read_text())
    if not match:
        raise SystemExit(f"{root}/CMakeLists.txt: no set(TESSERA_ROOMS ...) in it")
    return match.group(1).split()


def public_headers(root, rooms):
    found = {UMBRELLA}
    for room in rooms:
        text = re.sub(r"#.*", "", (root / "tessera" / room / "CMakeLists.txt").read_text())
        for block in re.findall(r"PUBLIC_HEADERS\s+((?:[\w./-]+\.h\s*)+)", text):
            found.update(f"tessera/{room}/{header}" for header in block.split())
    return found


def room_of(path):
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else None


def check_include(name, quote, target, context):
    """The complaint about one include, or None."""
    root, rooms, public = context
    is_public = name in public
    if not target.startswith("tessera/"):
        if quote == '"':
            return f'"{target}" is included by quotes; write <tessera/room/name.h>'
        if is_public and target.startswith(PRIVATE_LIBRARIES):
            return f"public header includes <{target}>, which users of the package need not have"
        return None
    if not (root / target).is_file():
        return f"<{target}> does not exist"
    if is_public and target not in public:
        return f"public header includes the private <{target}>"
    here, there = room_of(name), room_of(target)
    if there is None:
        if here in (None, rooms[-1]) or name.endswith("_test.cc"):
            return None
        return f"<{target}> is for users; include the rooms' own headers"
    if there not in rooms:
        return f"<{target}> lies in no room"
    if here is not None and rooms.index(there) > rooms.index(here):
        return f"room '{here}' includes <{target}> of the later room '{there}'"
    return None


def check(root):
    """All complaints about the tree, as 'file:line: text'."""
    root = pathlib.Path(root)
    rooms = room_order(root)
    context = (root, rooms, public_headers(root, rooms))
    complaints = [f"{name}: listed in PUBLIC_HEADERS, does not exist" for name in sorted(context[2]) if not (root / name).is_file()]
    for path in sorted([*root.glob("tessera/**/*.h"), *root.glob("tessera/**/*.cc")]):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        if room_of(name) not in [None, *rooms]:
            complaints.append(f"{name}: lies in no room of TESSERA_ROOMS")
            continue
        for match in INCLUDE.finditer(text):
            complaint = check_include(name, match.group(1), match.group(2), context)
            if complaint:
                complaints.append(f"{name}:{text.count(chr(10), 0, match.start(1)) + 1}: {complaint}")
    return complaints


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    complaints = check(sys.argv[1])
    print("\n".join(complaints) if complaints else "the includes follow the order of the rooms")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
