"""The import graph of the package: packages use packages of lower layers, and nothing uses studies or benchmarks."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "eigengrain"

#: packages that each package may import, besides itself and the modules of layer 0
BELOW = {
    "functional": set(),
    "heads": {"functional"},
    "models": {"functional", "heads"},
    "data": set(),
    "training": {"functional", "heads", "models", "data"},
    "explain": {"functional", "heads", "models", "data"},
    "explorer": {"functional", "heads", "models", "data", "training", "explain"},
    "report": {"functional", "heads", "models", "data", "training", "explain"},
    "cli": {"functional", "heads", "models", "data", "training", "explain", "explorer", "report"},
}
#: packages outside the standard library that a package may import, where that is restricted
ALLOWED = {"functional": {"torch", "numpy", "triton"}, "heads": {"torch"}}


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, at any depth of the code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str:
    """The package of a dotted name below eigengrain; "" for eigengrain itself and layer 0."""
    part = name.split(".")[1] if name.count(".") else ""
    return part if part in BELOW else ""


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_package_is_known():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == {*BELOW, "recipes"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    here = path.relative_to(PACKAGE).parts[0]
    ours = {name for name in imports(path) if name.split(".")[0] == "eigengrain"}
    used = {package_of(name) for name in ours} - {""}
    if here == "__init__.py" or here == "__main__.py":
        return  # the public names, loaded on first use
    assert used <= BELOW.get(here, set()) | {here}, f"{path.relative_to(PACKAGE)} imports {sorted(used)}"


@pytest.mark.parametrize("name", ALLOWED)
def test_the_core_needs_torch_alone(name):
    outside = set()
    for path in (PACKAGE / name).rglob("*.py"):
        outside |= {module.split(".")[0] for module in imports(path)}
    assert outside - set(sys.stdlib_module_names) - {"eigengrain"} <= ALLOWED[name]


def test_modules_have_no_cycle():
    """At module level; imports inside functions may point back within a package."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }
    graph = {}
    for name, path in modules.items():
        targets = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eigengrain"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    targets.add(full if full in modules else node.module)
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names if alias.name.startswith("eigengrain")}
        graph[name] = {target for target in targets if target in modules and target != name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_nothing_uses_studies_or_benchmarks():
    for path in FILES:
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"studies", "benchmarks"}, path
    for path in sorted((ROOT / "studies").rglob("*.py")):
        assert "benchmarks" not in {name.split(".")[0] for name in imports(path)}, path
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        assert "studies" not in {name.split(".")[0] for name in imports(path)}, path
