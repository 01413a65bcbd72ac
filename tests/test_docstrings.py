"""Every public name says what it is: a module, a class, a function or a method whose name does not begin with an underscore."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "quantkv"


def silent(node: ast.Module | ast.ClassDef, prefix: str = "") -> list[str]:
    """Public names below `node` without a docstring. A property's setter has its getter's."""
    found = []
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in child.decorator_list)
        if not setter and not ast.get_docstring(child):
            found.append(prefix + child.name)
        if isinstance(child, ast.ClassDef):
            found += silent(child, f"{prefix}{child.name}.")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module"
    assert silent(tree) == []


def test_what_has_none_is_found():
    accessors = "  @property\n  def c(self): pass\n  @c.setter\n  def c(self, x): pass\n"
    tree = ast.parse(f"class A:\n  'text'\n  def b(self): 'text'\n{accessors}  def _d(self): pass")
    assert silent(tree) == ["A.c"]
