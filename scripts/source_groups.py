#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which sources can be read as one, because most of a source's cost is libtorch's headers.

  source_groups.py FILES...    prints 'NUMBER FILE' for each source that goes into a group of at least two, as TESSERA_UNITY takes it
"""
import pathlib
import re
import sys

UNITY_LINES = 2000  # of one group: what a core compiles in about half a minute, so that no core waits long for the last one

HIDDEN = re.compile(r"^namespace \{$(.*?)^\} *// namespace$", re.MULTILINE | re.DOTALL)
KEYWORDS = {"int", "bool", "double", "void", "const", "operator", "noexcept"}
NAMES = re.compile(r"^(?!struct |class |union |enum )[\w:<].*?\b(\w+)(?=\(|\[|;| =|\{| \{)", re.MULTILINE)
ENUMERATORS = re.compile(r"^enum (?!class\b)[^{;]*\{([^}]*)\}", re.MULTILINE)  # those of an unscoped enumeration
TYPES = re.compile(r"^(?:struct|class|union|enum)(?: class)? (\w+)", re.MULTILINE)
ALIASES = re.compile(r"^using (?:(\w+) = .*|[\w:]*\b(\w+));$", re.MULTILINE)
USES = re.compile(r"\b[A-Z]\w*|(?<![\w.:>])[a-z]\w*(?=\()")  # types, and functions called by their bare name
MEMBERS = re.compile(r"\w::(\w+)(?=\()")  # inside a class its own function comes before a hidden one
MAIN = re.compile(r"^int (main)\(", re.MULTILINE)
OPENS_NAMESPACE = re.compile(r"^using namespace ", re.MULTILINE)  # for all that is read after it


def hidden_names(path):
    """What a source defines in its unnamed namespaces, roughly, with where it is defined: for an alias that is its own text, since the same
    alias may stand twice. Sources that define a name differently cannot be read as one."""
    text = path.read_text()
    blocks = HIDDEN.findall(text)
    defined = {name for block in blocks for name in NAMES.findall(block)} - KEYWORDS | set(MAIN.findall(text))
    for block in blocks:
        defined.update(TYPES.findall(block))
        defined.update(name for body in ENUMERATORS.findall(block) for name in re.findall(r"\bk[A-Z]\w*", body))
    return {name: str(path) for name in defined} | {found[1] or found[2]: found[0] for block in blocks for found in ALIASES.finditer(block)}


class Source:
    def __init__(self, path):
        text = path.read_text()
        self.names = hidden_names(path)
        self.hidden = {name for name, where in self.names.items() if where == str(path)}
        self.used = set(USES.findall(text)) - set(MEMBERS.findall(text))
        self.is_alone = OPENS_NAMESPACE.search(text) is not None


class Group:
    def __init__(self, kind):
        self.kind, self.size, self.paths = kind, 0, []
        self.names, self.hidden, self.used = {}, set(), set()

    def fits(self, source):
        """No name means two things, and what one source calls Shard or at(i) is not another's hidden Shard or at."""
        once = all(self.names.get(name, where) == where for name, where in source.names.items())
        return once and not self.hidden & source.used and not source.hidden & self.used

    def add(self, path, source, size):
        self.size += size
        self.paths.append(path)
        self.names |= source.names
        self.hidden |= source.hidden
        self.used |= source.used


def groups_of(paths, kind, size, limit):
    """Lists of paths: in each, `kind(path)` is the same, the sum of `size(path)` is at most the limit, and no hidden name is another
    source's. A source larger than the limit, and one that opens a namespace for all that follows, stay alone."""
    groups = []
    for path in paths:
        source, cost = Source(path), size(path)
        if source.is_alone:
            cost = limit
        for group in groups:
            if group.kind == kind(path) and group.size + cost <= limit and group.fits(source):
                break
        else:
            group = Group(kind(path))
            groups.append(group)
        group.add(path, source, cost)
    return [group.paths for group in groups]


def lines(path):
    return path.read_text().count("\n")


def main():
    paths = [pathlib.Path(name) for name in sys.argv[1:]]
    for number, group in enumerate(groups_of(paths, kind=lambda path: None, size=lines, limit=UNITY_LINES)):
        if len(group) > 1:
            print("\n".join(f"{number} {path}" for path in group))


if __name__ == "__main__":
    main()
