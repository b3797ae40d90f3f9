#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the tests of a run: each test of a GoogleTest executable by itself, every other ctest entry as one.

  count_tests.py RESULTS    the folder with ctest.xml and one NAME.xml per executable

Prints 'N passed, N failed' (and how many were skipped), the names of the failed ones before it.
"""
import pathlib
import sys
import xml.etree.ElementTree as xml


def outcome(case):
    skipped = case.find("skipped")
    if case.get("status") == "disabled" or case.get("result") == "skipped":
        return "skipped"
    if skipped is not None and "SKIP" in skipped.get("message", ""):
        return "skipped"
    # ctest calls "notrun" what it could not run: no executable, or what the test requires has failed.
    not_run = case.get("status") == "notrun" and skipped is not None
    if not_run or case.get("status") == "fail" or case.find("failure") is not None:
        return "failed"
    return "passed"


def count(results):
    """{'passed': [names], 'failed': [names], 'skipped': [names]}"""
    names = {"passed": [], "failed": [], "skipped": []}
    for entry in xml.parse(results / "ctest.xml").iter("testcase"):
        name, detail = entry.get("name"), results / f"{entry.get('name')}.xml"
        whole = outcome(entry)
        inner_failed = False
        if detail.is_file() and detail.stat().st_size:
            for case in xml.parse(detail).iter("testcase"):
                inner = outcome(case)
                inner_failed = inner_failed or inner == "failed"
                names[inner].append(f"{name}: {case.get('classname')}.{case.get('name')}")
            if whole == "failed" and not inner_failed:
                names["failed"].append(f"{name}: the executable itself")
        else:
            names[whole].append(name)
    return names


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    names = count(pathlib.Path(sys.argv[1]))
    for name in names["failed"]:
        print(f"FAILED {name}")
    skipped = f", {len(names['skipped'])} skipped" if names["skipped"] else ""
    print(f"{len(names['passed'])} passed, {len(names['failed'])} failed{skipped}")


if __name__ == "__main__":
    main()
