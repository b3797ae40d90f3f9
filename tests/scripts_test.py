#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that the scripts of continuous integration see what they are there to see."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
import count_tests
import lint
import source_groups

CTEST = """<testsuite>
<testcase name="mesh_test" status="{mesh}"/>
<testcase name="includes" status="run"/>
<testcase name="consumer" status="notrun"><skipped message="Fixture dependency failed"/></testcase>
</testsuite>"""
GTEST = """<testsuites><testsuite name="Mesh">
<testcase name="A" classname="Mesh" status="run" result="completed"/>
<testcase name="B" classname="Mesh" status="run" result="completed">{failure}</testcase>
<testcase name="C" classname="Mesh" status="run" result="skipped"><skipped message="SKIP"/></testcase>
</testsuite></testsuites>"""


class CountTests(unittest.TestCase):
    def count(self, mesh, failure):
        with tempfile.TemporaryDirectory() as folder:
            results = pathlib.Path(folder)
            (results / "ctest.xml").write_text(CTEST.format(mesh=mesh))
            if failure is not None:
                (results / "mesh_test.xml").write_text(GTEST.format(failure=failure))
            names = count_tests.count(results)
            return tuple(len(names[kind]) for kind in ("passed", "failed", "skipped"))

    def test_counts_each_test_and_what_could_not_run(self):
        self.assertEqual(self.count("run", ""), (3, 1, 1))

    def test_counts_a_failed_test_once(self):
        self.assertEqual(self.count("fail", "<failure/>"), (2, 2, 1))

    def test_counts_an_executable_that_fails_after_its_tests(self):
        self.assertEqual(self.count("fail", ""), (3, 2, 1))

    def test_counts_an_executable_that_left_no_results(self):
        self.assertEqual(self.count("fail", None), (1, 2, 0))


class Lint(unittest.TestCase):
    def complaints(self, text, name="thing.cc"):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / name
            path.write_text(text)
            return lint.check_text(path)

    def function(self, lines):
        return "// SPDX-License-Identifier: Apache-2.0\nnamespace tessera {\n\nvoid f() {\n" + "  g();\n" * (lines - 2) + "}\n\n}\n"

    def test_limits_the_length_of_a_function(self):
        self.assertEqual(self.complaints(self.function(70)), [])
        self.assertIn("71 lines in one function", self.complaints(self.function(71))[0])

    def test_lets_a_table_be_long(self):
        table = "const int kRows[] = {\n" + "  1,\n" * 100 + "};\n"
        self.assertEqual(self.complaints("// SPDX-License-Identifier: Apache-2.0\n" + table), [])

    def test_limits_the_length_of_a_source(self):
        text = "// SPDX-License-Identifier: Apache-2.0\n" + "int a;\n" * 500
        self.assertIn("501 lines", self.complaints(text)[0])

    def test_wants_the_licence_line(self):
        self.assertIn("lacks", self.complaints("int a;\n")[0])

    def groups(self, bodies, commands=None):
        """The indices of the sources that are read together."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder) / f"{number}.cc" for number in range(len(bodies))]
            for path, body in zip(paths, bodies):
                path.write_text(f"namespace {{\n\n{body}\n\n}} // namespace\n")
            flags = {path: {"command": command} for path, command in zip(paths, commands or ["c++ -I/a"] * len(paths))}
            return [[paths.index(path) for path in group] for group in lint.groups_of(paths, flags)]

    def test_reads_apart_what_shares_a_hidden_name(self):
        bodies = [f"int {name}(int x) {{\n  return x;\n}}" for name in "ffg"]
        self.assertEqual(self.groups(bodies), [[0, 2], [1]])
        self.assertEqual(self.groups(["constexpr int kRows[] = {1};", "constexpr int kRows[] = {2};"]), [[0], [1]])
        self.assertEqual(self.groups(["enum A : int {\n  kOne,\n};", "enum B : int { kOne };", "enum class C { kOne };"]), [[0, 2], [1]])

    def test_reads_together_what_shares_an_alias(self):
        self.assertEqual(self.groups(["using Clock = A;", "using Clock = A;", "using Clock = B;"]), [[0, 1], [2]])

    def test_reads_apart_what_hides_a_name_that_another_uses(self):
        self.assertEqual(self.groups(["struct Shard {\n};", "int f(const Shard& shard) {\n}", "int g() {\n}"]), [[0, 2], [1]])
        self.assertEqual(self.groups(["struct Net : Module {\n};", "struct Other : Module {\n};"]), [[0, 1]])

    def test_reads_together_what_uses_the_same_name(self):
        self.assertEqual(self.groups(["using testing::Not;", "using testing::Not;", "using other::Not;"]), [[0, 1], [2]])

    def test_reads_alone_what_opens_a_namespace(self):
        self.assertEqual(self.groups(["", "} // namespace\nusing namespace a;\nnamespace {\n", ""]), [[0, 2], [1]])

    def test_finds_the_sources_of_a_joined_one(self):
        with tempfile.TemporaryDirectory() as folder:
            joined = pathlib.Path(folder).resolve() / "Unity" / "unity_0_cxx.cxx"
            joined.parent.mkdir()
            joined.write_text('#include "/s/a.cc"\n\n#include "/s/b.cc"\n')
            flags = lint.flags_by_source([{"file": str(joined), "command": f"c++ -c {joined}"}, {"file": "/s/c.cc", "command": "c++ -c /s/c.cc"}])
            self.assertEqual([entry["command"] for entry in flags.values()], ["c++ -c /s/a.cc", "c++ -c /s/b.cc", "c++ -c /s/c.cc"])

    def test_keeps_a_group_below_its_limit(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder) / f"{number}.cc" for number in range(4)]
            for path, count in zip(paths, (3, 9, 3, 3)):
                path.write_text("int x;\n" * count)
            found = source_groups.groups_of(paths, kind=lambda path: None, size=source_groups.lines, limit=7)
            self.assertEqual([[paths.index(path) for path in group] for group in found], [[0, 2], [1], [3]])

    def test_reads_apart_what_sees_other_folders(self):
        self.assertEqual(self.groups(["", "", ""], ["c++ -O2 -I/a", "c++ -I/b", "c++ -I/a"]), [[0, 2], [1]])


if __name__ == "__main__":
    unittest.main()
