"""Write the signatures of Transformer Engine's calls that this project makes, read from its pure-Python wheel.

The package cannot be imported without its CUDA libraries, but its wheel holds every signature:

    pip download --no-deps transformer-engine
    python scripts/te_signatures.py transformer_engine-2.20.2-py3-none-any.whl > tests/vectors/te_signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile

CALLS = {
    "DotProductAttention.__init__": "pytorch/attention/dot_product_attention/dot_product_attention.py",
    "DotProductAttention.forward": "pytorch/attention/dot_product_attention/dot_product_attention.py",
    "Linear.__init__": "pytorch/module/linear.py",
    "Linear.forward": "pytorch/module/linear.py",
    "RMSNorm.__init__": "pytorch/module/rmsnorm.py",
    "ops.RMSNorm.__init__": "pytorch/ops/basic/rmsnorm.py",  # where the ** of the one above goes
    "autocast.__init__": "pytorch/quantization.py",
}
RECIPES = "common/recipe/__init__.py"


def main(wheel: str) -> None:
    archive = zipfile.ZipFile(wheel)
    found: dict[str, object] = {"wheel": wheel.rpartition("/")[2]}
    for call, file in CALLS.items():
        *_, class_name, method = call.split(".")
        tree = ast.parse(archive.read(f"transformer_engine/{file}"))
        found[call] = _signature(_member(tree, class_name, method))
    recipes = ast.parse(archive.read(f"transformer_engine/{RECIPES}"))
    found["recipes"] = [node.name for node in recipes.body if isinstance(node, ast.ClassDef)]
    print(json.dumps(found, indent=1))


def _member(tree: ast.Module, class_name: str, method: str) -> ast.FunctionDef:
    (owner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    (member,) = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return member


def _signature(function: ast.FunctionDef) -> dict[str, list[str]]:
    """Names without `self`: those that must be given, those with a default, those by keyword only, and `**`."""
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    num_required = len(positional) - len(arguments.defaults)
    return {
        "required": positional[:num_required],
        "optional": positional[num_required:],
        "keyword_only": [a.arg for a in arguments.kwonlyargs],
        "rest": [arguments.kwarg.arg] if arguments.kwarg else [],
    }


if __name__ == "__main__":
    main(sys.argv[1])
