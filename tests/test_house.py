"""The house: who may import whom, one name for one thing, nothing private across modules.

All of it is read from the source with `ast`; imports inside functions and under TYPE_CHECKING count like any others.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from scripts.house import PICTURE, house, imports

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
# From the bottom up; a package imports only what stands before it, or beside it on the same line.
ORDER = (
    ("errors", "files", "progress", "threads"), ("text",), ("data",), ("backbone",), ("methods",), ("reference",),
    ("thinking",), ("heads",), ("trust",), ("adapters",), ("training",), ("inference",), ("labels",), ("bench",),
    ("batch",), ("export",), ("viz",), ("report",), ("analysis",), ("serve",), ("studio",), ("cli",),
)  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}
# What stands below and is not to be imported all the same.
BARRED = {
    "backbone": {"data"},
    "methods": {"data", "backbone.accel"},
    "reference": {"data", "backbone", "methods"},
    "report": {"text", "data", "backbone", "methods", "reference", "thinking", "heads", "trust", "training", "adapters"}
    | {"inference", "labels"},
    "analysis": {"report"},
}
# `report` reads records: of `bench` it may know the store.
ONLY = {("report", "bench"): "bench.store"}
# Names that several packages share on purpose: a contract, a folder on disk, a method and its plain form.
SHARED_FILES = {"__init__", "base", "folder", "perl"}
# Private names of other libraries for which they have no public one.
FOREIGN = {
    "_schema",
    "_version",
    "_exit",
    "_int_mm",
    "_linear_pointwise",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_mm",
}  # torch's count of a tensor's in-place changes; leaving a process at once


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name; a package's `__init__` has the package's."""
    found = {}
    for path in sorted((SOURCE / "perlclip").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def package_of(module: str) -> str:
    """`methods` of `perlclip.methods.perl`; nothing of the root itself."""
    return module.partition(".")[2].partition(".")[0]


def imported(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each import of ours as (the module, the name taken from it or "")."""
    is_package = (SOURCE / name.replace(".", "/")).is_dir()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "perlclip")
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            if origin.split(".")[0] != "perlclip":
                continue
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield (inner, "") if inner in modules() else (origin, alias.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from ((word.value, "") for word in node.args if getattr(word, "value", None) in modules())


@cache
def edges() -> list[tuple[str, str]]:
    """(importer, imported) of all modules; the root is lazy and stands apart."""
    pairs = {(name, module) for name, tree in modules().items() for module, _ in imported(name, tree)}
    return sorted((a, b) for a, b in pairs if "perlclip" not in (a, b))


def method_files() -> set[str]:
    """Modules with a class that is registered."""
    return {
        name
        for name, tree in modules().items()
        for node in tree.body
        if package_of(name) == "methods" and isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "register"
    }


def test_every_package_has_its_place():
    assert {package_of(name) for name in modules()} - {""} <= set(LEVEL)


def test_no_import_goes_up():
    upward = [f"{a} -> {b}" for a, b in edges() if LEVEL[package_of(b)] > LEVEL[package_of(a)]]
    assert not upward, "\n".join(upward)


def test_no_package_imports_what_is_barred_to_it():
    wrong = []
    for a, b in edges():
        inner = b.removeprefix("perlclip.")
        if any(inner == barred or inner.startswith(f"{barred}.") for barred in BARRED.get(package_of(a), ())):
            wrong.append(f"{a} -> {b}")
        if inner != ONLY.get((package_of(a), package_of(b)), inner):
            wrong.append(f"{a} -> {b}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for a, b in edges():
        graph[a].add(b)
    circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            circle = error.args[1]
            circles.append(" <- ".join(circle))
            graph[circle[1]].discard(circle[0])
    assert not circles, "\n".join(circles)


def test_a_method_is_one_file():
    """It imports no other method, and training names none."""
    files = method_files()
    assert {f"perlclip.methods.{name}" for name in ("zero_shot", "perl", "coop")} <= files
    wrong = [f"{a} -> {b}" for a, b in edges() if b in files and (a in files or package_of(a) == "training")]
    assert not wrong, "\n".join(wrong)


def test_the_root_is_lazy():
    """Nothing is imported with it, and nothing below `cli` goes the way round through it."""
    top = [node for node in modules()["perlclip"].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [ast.unparse(node) for node in top if "perlclip" in ast.unparse(node)]
    wrong = []
    for name, tree in modules().items():
        if package_of(name) in ("", "cli"):
            continue
        taken = {taken for module, taken in imported(name, tree) if module == "perlclip"} - {""}
        taken |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "perlclip"
        }
        wrong += [f"{name}: perlclip.{attribute}" for attribute in sorted(taken - {"__version__"})]
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_does_not_import_torch():
    lines = "import sys, perlclip; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", lines], check=True)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in FOREIGN


def defined(tree: ast.Module) -> set[str]:
    """All names that a module gives to something: functions, classes, variables, attributes that it sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_no_private_name_is_used_in_another_module():
    """Neither imported, nor taken from a module or an object of another one."""
    wrong = []
    for name, tree in modules().items():
        wrong += [f"{name}: {module}.{taken}" for module, taken in imported(name, tree) if private(taken)]
        own = defined(tree)
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and private(n.attr)}
        wrong += [f"{name}: .{attribute}" for attribute in sorted(used - own)]
    assert not wrong, "\n".join(wrong)


def test_one_file_name_for_one_thing():
    places: dict[str, list[str]] = defaultdict(list)
    for path in (SOURCE / "perlclip").rglob("*.py"):
        if path.stem not in SHARED_FILES:
            places[path.stem].append(str(path.relative_to(SOURCE / "perlclip")))
    assert not [found for found in places.values() if len(found) > 1]


def test_one_class_name_for_one_thing():
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_benchmarks_scripts_and_the_package_do_not_import_tests():
    wrong = []
    for folder, barred in (("src", {"tests", "benchmarks"}), ("benchmarks", {"tests"}), ("scripts", {"tests"})):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                wrong += [f"{path.name}: {name}" for name in names if name.split(".")[0] in barred]
    assert not wrong, "\n".join(wrong)


def test_the_picture_and_the_table_of_the_house_are_drawn_from_it():
    assert PICTURE.read_text() == house(), "python -m scripts.house draws it"
    direct = {(package_of(a), package_of(b)) for a, b in edges() if package_of(a) != package_of(b)}
    assert {(package, name) for package in LEVEL for name in imports(package)} == direct
