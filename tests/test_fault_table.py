"""The table of faults in README.md: every number has its tests, and they exist under that number."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d*) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def functions(file: str) -> set[str]:
    """Names of all test functions of a file, methods included."""
    tree = ast.parse((HERE / file).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def carries(number: int, name: str) -> bool:
    """`test_fault_16_...`, `test_faults_16_129_...`, `test_fault_66_and_67_...`."""
    numbers = re.match(r"test_faults?_(\d+(?:_(?:and_)?\d+)*)", name)
    return numbers is not None and number in map(int, re.findall(r"\d+", numbers[1]))


def test_every_test_that_the_table_names_exists_and_carries_the_number():
    for number, what, tests in ROW.findall((HERE / "README.md").read_text("utf-8")):
        assert TEST.search(tests), f"{number} {what}: no test"
        for file, name in TEST.findall(tests):
            assert name in functions(file), f"{number}: {file} has no {name}"
            assert not number or carries(int(number), name), f"{name} does not carry {number}"
