"""Breaks the numerics one line at a time, to see that the tests notice: phases, layout rules, comparisons.

    python tests/bench/mutation.py [--only grad_sync] [--list] [--jobs 2]

Every call, comparison, condition, sign and constant of `grad_sync.py`, `layout.py` and `divergence.py` is changed
alone in a temporary copy of the tree, and the narrow tests of that file run until one fails. Prints each change that
none noticed, and the sums; exits with 1 where one survived. What changes nothing is listed below, with its reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = 60
"""Of one run of the narrow tests: a broken loop ends here, however busy the machine is."""
MEMORY_LIMIT_BYTES = 6 * 2**30
"""Of address space: a broken loop that fills a list is caught here."""
HUNG = -signal.SIGXCPU

TESTS = {
    "grad_sync": (
        "tests/unit/workers/test_grad_sync.py",
        "tests/unit/workers/test_layernorm_sync.py",
        "tests/unit/workers/test_wire.py",
        "tests/golden/test_final.py",
        "tests/unit/workers/test_virtual.py",
    ),
    "layout": (
        "tests/unit/workers/test_layout.py",
        "tests/golden/test_layout.py",
        "tests/unit/workers/test_prediction.py",
        "tests/unit/workers/test_grad_sync.py",
    ),
    "divergence": (
        "tests/unit/workers/test_judged_pieces.py",
        "tests/unit/workers/test_divergence.py",
        "tests/unit/workers/test_wire.py",
        "tests/unit/workers/test_deviation.py",
        "tests/unit/workers/test_virtual.py",
    ),
}
"""Quick ones first: the first that fails ends it."""
SELECTED = "not gloo_ranks and not (wide_meshes and 64)"
"""Of golden vectors that run on processes and on virtual ranks, the latter; and no mesh that takes long."""

EQUIVALENT: dict[tuple[str, str], str] = {
    ("grad_sync", "all_reduce_tied: if mesh.pp == 1 -> if False"): "a sum over the one member of a group of one",
    ("grad_sync", "all_reduce_layernorms: True -> False"): "zip's strict; both sides come from the same list",
    ("divergence", "_attribute: if wrong_n.any() -> if True"): "saves work: of no wrong element nothing is told",
    ("divergence", "_judge_reference: if astray_Cn.any() -> if True"): "saves work, as above",
    (
        "divergence",
        "add: replayed is not None and piece.floor_C is not None -> replayed is not None or piece.floor_C is not None",
    ): "a piece has both or neither",
    ("divergence", "_peak: value > held -> value >= held"): "the larger of two equal numbers",
    ("layout", "_rules: stay -> move"): "de4028a gives the tied weight no bucket of its own, whose start could move",
    ("layout", "_rules: False -> True (2)"): "de4028a gives the tied weight no bucket of its own, to assert its start",
    (
        "layout",
        "_rules: stay -> move (3)",
    ): "a67ffda stops where a start is not divisible; else nothing is padded",
    ("layout", "resolve: 0 -> 1 (2)"): "no release is 0.1, and neither it nor 0.0 has a layout",
}
"""(file, change) -> why no test could see it."""


@dataclass(frozen=True)
class Mutant:
    """One changed file."""

    file: str
    line: int
    function: str
    change: str
    source: str

    @property
    def title(self) -> str:
        return f"{self.function}: {self.change}"

    @property
    def place(self) -> str:
        return f"workers/{self.file}.py:{self.line} {self.title}"


SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"divide": "inverse", "inverse": "divide", "stay": "move", "some": "stay", "move": "some"}
"""The arguments of a layout rule that are names."""


def mutants(file: str) -> Iterator[Mutant]:
    """Every change of one file, in order."""
    tree = ast.parse((ROOT / "workers" / f"{file}.py").read_text())
    functions = {
        child: definition.name
        for definition in ast.walk(tree)
        if isinstance(definition, ast.FunctionDef)
        for child in ast.walk(definition)
    }
    # Annotations are not run, and the words of an error are nobody's numbers.
    never_run = {
        part
        for node in ast.walk(tree)
        for unseen in (getattr(node, "annotation", None), getattr(node, "returns", None), getattr(node, "exc", None))
        if unseen
        for part in ast.walk(unseen)
    }
    titles: Counter[tuple[str, str]] = Counter()
    for index, node in enumerate(ast.walk(tree)):
        if node not in functions or node in never_run or isinstance(node, ast.FunctionDef):
            continue
        for new in replacements(node):
            changed = copy.deepcopy(tree)
            target = next(n for i, n in enumerate(ast.walk(changed)) if i == index)
            Replace(target, new).visit(changed)
            line = getattr(node, "lineno", 0)
            change = f"{shown(node)} -> {shown(new)}"
            titles[functions[node], change] += 1
            if titles[functions[node], change] > 1:
                change += f" ({titles[functions[node], change]})"
            yield Mutant(file, line, functions[node], change, ast.unparse(ast.fix_missing_locations(changed)))


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be broken into."""
    if isinstance(node, ast.Compare):
        for position, operator in enumerate(node.ops):
            for other in SWAPS[type(operator)]:
                yield changed_copy(node, ops=[*node.ops[:position], other(), *node.ops[position + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and not is_text(node):
        for other in SWAPS.get(type(node.op), ()):
            yield changed_copy(node, op=other())
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.AugAssign):
        for other in SWAPS.get(type(node.op), ()):
            yield changed_copy(node, op=other())
    elif isinstance(node, ast.If | ast.IfExp):
        for truth in (True, False):
            yield changed_copy(node, test=ast.Constant(truth))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield):
        yield ast.Pass()
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], ast.Load())


def shown(node: ast.AST) -> str:
    """A node's text; of a condition only what is tested."""
    if isinstance(node, ast.If | ast.IfExp):
        return f"if {ast.unparse(node.test)}"
    return ast.unparse(node)


def is_text(node: ast.BinOp | ast.BoolOp) -> bool:
    return "'" in ast.unparse(node)


def changed_copy(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


class Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, new: ast.AST) -> None:
        self._target, self._new = target, new

    def visit(self, node: ast.AST) -> ast.AST:
        return copy.deepcopy(self._new) if node is self._target else self.generic_visit(node)


class Tree:
    """A temporary copy of the repository's files, in which one file at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if name.startswith(("workers/", "tests/", "pyproject.toml")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def outcome(self, mutant: Mutant) -> str:
        """Whether the narrow tests fail, or do not end."""
        path = self.folder / "workers" / f"{mutant.file}.py"
        kept = path.read_text()
        path.write_text(mutant.source)
        try:
            return {0: "survived", HUNG: "hung"}.get(self.run_tests(mutant.file), "caught")
        finally:
            path.write_text(kept)

    def run_tests(self, file: str) -> int:
        """Pytest's exit code, from a fork of this process that has torch loaded but nothing of the tree."""
        process_id = os.fork()
        if process_id == 0:
            os._exit(self._child(file))
        _, status = os.waitpid(process_id, 0)
        return os.waitstatus_to_exitcode(status)

    def _child(self, file: str) -> int:
        import pytest
        import torch

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 10))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        torch.set_num_threads(1)
        os.chdir(self.folder)
        sys.path[:0] = [str(self.folder)]
        sys.dont_write_bytecode = True
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        plain = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-k", SELECTED]
        return int(pytest.main([*plain, *TESTS[file]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TESTS), nargs="+", default=list(TESTS))
    parser.add_argument("--list", action="store_true", help="only print what would be changed")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    found = [mutant for file in options.only for mutant in mutants(file)]
    if gone := unknown_excuses(found, options.only):
        raise SystemExit(f"excused, but nothing like it is left to change: {gone}")
    found = [mutant for mutant in found if (mutant.file, mutant.title) not in EQUIVALENT]
    if options.list:
        for mutant in found:
            print(mutant.place)
        return 0
    return run(found, options.only, options.jobs)


def unknown_excuses(found: list[Mutant], files: list[str]) -> list[tuple[str, str]]:
    titles = {(mutant.file, mutant.title) for mutant in found}
    return [excuse for excuse in EQUIVALENT if excuse[0] in files and excuse not in titles]


def run(found: list[Mutant], files: list[str], num_jobs: int) -> int:
    """Break one thing after another; 1 where something survived."""
    load_once()
    with tempfile.TemporaryDirectory(prefix="gradgate-mutation-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(num_jobs):
            trees.put(Tree(Path(folder) / str(number)))

        def outcome(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                seen = tree.outcome(mutant)
            finally:
                trees.put(tree)
            if seen != "caught":
                print(f"{seen}: {mutant.place}", flush=True)
            return seen

        tree = trees.get()
        for file in files:
            if code := tree.run_tests(file):
                raise SystemExit(f"the tests of {file}.py fail as they are (exit code {code})")
        trees.put(tree)
        with ThreadPoolExecutor(num_jobs) as pool:
            outcomes = list(pool.map(outcome, found))
    for file in files:
        mine = Counter(seen for mutant, seen in zip(found, outcomes, strict=True) if mutant.file == file)
        excused = sum(known == file for known, _ in EQUIVALENT)
        print(
            f"{file}.py: {mine.total()} changes: {mine['caught']} caught, {mine['hung']} hung, "
            f"{mine['survived']} survived; {excused} more change nothing"
        )
    return int("survived" in outcomes)


def load_once() -> None:
    """Import what every fork needs, and nothing of the tree."""
    for name in ("hypothesis", "numpy", "pytest", "torch"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
