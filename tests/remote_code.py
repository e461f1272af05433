"""What tests of remote code share: a process without the package, and what a module reads."""

import ast
import sys
from pathlib import Path

import hf_deco

WITHOUT_PACKAGE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_deco":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, NotInstalled())
"""

MODELS = Path(hf_deco.__file__).parent / "models"
ALLOWED = {"torch", "transformers", "safetensors", "huggingface_hub", "numpy", *sys.stdlib_module_names}


def import_closure(module):
    """Every file that a module reads, by walking the syntax trees; other packages than the allowed ones fail."""
    found, open_files = set(), [f"{module}.py"]
    while open_files:
        name = open_files.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((MODELS / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                # `from . import x` and packages are not copied with a checkpoint.
                assert node.level == 1 and node.module and "." not in node.module, f"{name}, line {node.lineno}"
                open_files.append(f"{node.module}.py")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {imported.split(".")[0] for imported in names} <= ALLOWED, f"{name}, line {node.lineno}"
    return found
