"""The house rules that a machine can check: who imports whom, what an import costs, what may be in the tree.

Run: pytest tests/test_house.py (a few seconds).
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import vit

ROOT = Path(vit.__file__).parents[1]
CODE = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "app.py", *sorted(ROOT.glob("vit/**/*.py")), *sorted(ROOT.glob("train/**/*.py")))
    if path.exists()
]
PAGES = ("app.py", "vit/page/", "train/page/")
FIGURES = ("vit/explanation.py", "vit/notebook.py")  # an Explanation gives a Plotly figure
POSIX_ONLY = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd",
              "syslog", "termios", "tty"}  # fmt: skip
LARGEST_BYTES = 16 * 2**20


def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), name)


def imported(node: ast.AST, package: str = "") -> Iterator[str]:
    """The full names of the modules that one statement imports, if it is an import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
        "import_module",
        "__import__",
    ):
        yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def imports(name: str) -> set[str]:
    """The packages that a file imports anywhere, as `vit`, `streamlit`."""
    package = name.removesuffix(".py").replace("/", ".").rpartition(".")[0]
    return {module.split(".")[0] for node in ast.walk(parsed(name)) for module in imported(node, package)}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All that runs when a module is imported: everything outside functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def in_the_tree() -> list[Path]:
    """The files that git tracks, and those it would."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this copy is not a git checkout, or git is not installed")
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True)
    return [path for name in listing.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_code_to_look_at():
    assert {"vit/model.py", "vit/checkpoint.py"} < set(CODE)


# --- imports run one way


@pytest.mark.parametrize("name", CODE)
def test_imports_run_from_vit_to_train_to_app(name):
    forbidden = {"vit": {"train", "app"}, "train": {"app"}}.get(name.split("/")[0], set())
    assert not imports(name) & forbidden


@pytest.mark.parametrize("name", [name for name in CODE if not name.startswith(PAGES)])
def test_only_pages_know_of_streamlit_and_plotly(name):
    assert not imports(name) & ({"streamlit"} if name in FIGURES else {"streamlit", "plotly"})


def test_plotly_is_imported_at_the_call_that_returns_a_figure():
    modules = ", ".join(name.removesuffix(".py").replace("/", ".") for name in FIGURES)
    assert run(f"import sys, {modules}; print('plotly' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("name", CODE)
def test_no_module_needs_posix_to_be_imported(name):
    found = {module.split(".")[0] for node in at_import(parsed(name)) for module in imported(node)}
    assert not found & POSIX_ONLY


# --- what an import costs


@pytest.mark.parametrize("module", ["vit", "vit.images", "vit.datasets", "vit.sources", "vit.download"])
def test_importing_does_not_import_torch(module):
    heavy = "('torch', 'torchvision', 'streamlit', 'plotly')"
    assert run(f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


@pytest.mark.skipif(find_spec("vit.__main__") is None, reason="there is no `python -m vit` yet")
def test_help_does_not_import_torch():
    code = """
import runpy, sys
sys.argv = ["vit", "--help"]
try:
    runpy.run_module("vit", run_name="__main__")
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False"


def test_library_and_trainer_do_without_streamlit_and_plotly():
    """Every module but the pages, on a machine that has neither."""
    modules = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in CODE
        if not name.startswith(PAGES) and not name.endswith("__main__.py")
    ]
    assert {"vit.evaluate", "train.loop"} < set(modules)
    code = f"""
import importlib, sys
sys.modules["streamlit"] = sys.modules["plotly"] = sys.modules["tensorboard"] = None
for name in {modules!r}:
    importlib.import_module(name)
print("all")
"""
    assert run(code).split() == ["all"]


def test_a_name_is_imported_when_it_is_used():
    assert run("import sys, vit; vit.load; print('torch' in sys.modules)").strip() == "True"


def test_every_public_name_is_there():
    assert len(set(vit.__all__)) == len(vit.__all__)
    for name in vit.__all__:
        assert callable(getattr(vit, name)) or name.isupper(), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vit.nonsense


def test_functions_are_not_hidden_by_modules():
    code = "import vit.explanation, vit; print(vit.explain is vit.explanation.explain, callable(vit.explain))"
    assert run(code).split() == ["True", "True"]
    assert not {path.stem for path in (ROOT / "vit").iterdir()} & set(vit.__all__)


# --- errors are neither swallowed nor caught blindly


def caught(node: ast.AST) -> set[str]:
    """The last parts of the names of the errors that a handler, or `suppress`, catches."""
    if isinstance(node, ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
        kinds = node.args
    else:
        return set()
    return {ast.unparse(kind).split(".")[-1] if kind else "everything" for kind in kinds}


def is_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


@pytest.mark.parametrize("name", CODE)
def test_no_error_is_caught_blindly_or_dropped(name):
    for node in ast.walk(parsed(name)):
        where = f"{name}, line {getattr(node, 'lineno', 0)}"
        assert not caught(node) & {"everything", "Exception", "BaseException"}, where
        if isinstance(node, ast.ExceptHandler):
            assert not all(is_nothing(statement) for statement in node.body), where


# --- what is in the tree


def test_no_file_is_large():
    assert [path for path in in_the_tree() if path.stat().st_size > LARGEST_BYTES] == []


def test_no_data_set_is_in_the_tree():
    data = re.compile(r".*\.parquet|(data|test)_batch.*|batches\.meta|cifar-10.*", re.IGNORECASE)
    assert [path for path in in_the_tree() if data.fullmatch(path.name)] == []


def test_no_folder_of_a_machine_is_named():
    folders = re.compile(rb"(?<![\w.])/(work|tmp/env|root|home/[a-z]+)/")
    ours = [ROOT / "app.py", *ROOT.glob("README*")] + [
        ROOT / name for name in ("vit", "train", "tests", "assets")
    ]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in in_the_tree()
        if any(path == mine or mine in path.parents for mine in ours) and folders.search(path.read_bytes())
    ]
    assert found == []
