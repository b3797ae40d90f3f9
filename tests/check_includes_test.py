#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks a small tree in each way that check_includes.py must see."""
import pathlib
import tempfile
import unittest

import check_includes

TREE = {
    "CMakeLists.txt": "set(TESSERA_ROOMS base comm cli)\n",
    "tessera/tessera.h": "#include <tessera/comm/world.h>\n",
    "tessera/base/CMakeLists.txt": "tessera_room(base SOURCES text.cc PUBLIC_HEADERS error.h)\n",
    "tessera/base/error.h": "#include <string>\n",
    "tessera/base/text.h": "#include <fmt/core.h>\n",
    "tessera/base/text.cc": "#include <tessera/base/text.h>\n",
    "tessera/comm/CMakeLists.txt": "tessera_room(comm\n  PUBLIC_HEADERS world.h group.h\n  TESTS a_test.cc)\n",
    "tessera/comm/world.h": "#include <tessera/base/error.h>\n",
    "tessera/comm/group.h": "#include <tessera/comm/world.h>\n",
    "tessera/comm/world.cc": "#include <tessera/comm/world.h>\n#include <tessera/base/text.h>\n",
    "tessera/cli/CMakeLists.txt": "tessera_program(cli MAIN main.cc)\n",
    "tessera/cli/main.cc": "#include <tessera/tessera.h>\n",
}


class CheckIncludes(unittest.TestCase):
    def complaints(self, changes):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**TREE, **changes}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return check_includes.check(root)

    def assert_one(self, changes, *parts):
        complaints = self.complaints(changes)
        self.assertEqual(len(complaints), 1, complaints)
        for part in parts:
            self.assertIn(part, complaints[0])

    def test_accepts_a_tree_in_order(self):
        self.assertEqual(self.complaints({}), [])

    def test_sees_an_arrow_against_the_order(self):
        self.assert_one({"tessera/base/text.cc": "\n#include <tessera/comm/world.h>\n"}, "tessera/base/text.cc:2", "later room 'comm'")

    def test_sees_an_arrow_in_a_test(self):
        self.assert_one({"tessera/base/text_test.cc": "# include <tessera/comm/group.h>\n"}, "later room 'comm'")

    def test_sees_a_private_header_in_a_public_one(self):
        self.assert_one({"tessera/comm/group.h": "#include <tessera/base/text.h>\n"}, "tessera/comm/group.h:1", "private")

    def test_sees_a_private_library_in_a_public_header(self):
        self.assert_one({"tessera/comm/group.h": "#include <spdlog/spdlog.h>\n"}, "spdlog")

    def test_sees_the_umbrella_inside_the_library(self):
        self.assert_one({"tessera/comm/world.cc": "#include <tessera/tessera.h>\n"}, "for users")

    def test_sees_a_private_header_in_the_umbrella(self):
        self.assert_one({"tessera/tessera.h": "#include <tessera/base/text.h>\n"}, "private")

    def test_sees_quotes_and_missing_files(self):
        self.assert_one({"tessera/comm/world.cc": '#include "world.h"\n'}, "quotes")
        self.assert_one({"tessera/comm/world.cc": "#include <tessera/comm/gone.h>\n"}, "does not exist")
        self.assert_one({"tessera/base/CMakeLists.txt": "tessera_room(base PUBLIC_HEADERS error.h gone.h)\n"}, "gone.h")

    def test_sees_a_folder_that_is_no_room(self):
        self.assert_one({"tessera/attic/old.cc": "#include <string>\n"}, "lies in no room")


if __name__ == "__main__":
    unittest.main()
