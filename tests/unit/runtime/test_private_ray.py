"""Ray's private names stand in few places: each release of Ray may change them."""

from __future__ import annotations

import ast
from pathlib import Path

import finray

# The files that may use them, and with how many imports at most in all.
WHERE = {"cluster.py", "token.py", "gcs.py", "trainer.py", "elastic.py"}
MOST = 20


def is_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "ray" and any(part.startswith("_") or part == "generated" for part in rest)


def private_imports(source: str) -> list[str]:
    """The private modules of Ray that a file imports, or names by their whole path."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.append(f"{node.module}.{node.names[0].name}" if node.module == "ray" else node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("ray", "connected.ray"):
            names.append(f"ray.{node.attr}")
    return [name for name in names if is_private(name)]


def test_private_modules_of_ray_are_imported_in_few_files() -> None:
    folder = Path(finray.__file__).parent
    found = {file: private_imports(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py")}
    users = {file: names for file, names in found.items() if names}
    assert {file.name for file in users} <= WHERE
    assert all(file.parent.name == "runtime" for file in users)
    assert sum(map(len, users.values())) <= MOST


def test_a_private_import_is_seen() -> None:
    code = "from ray import _private\nfrom ray._raylet import Config\nimport ray.train.v2._internal.constants\n"
    code += "from ray.core.generated import gcs_pb2\nray._private.worker\nfrom ray.train import report\nimport ray\n"
    assert len(private_imports(code)) == 5
