"""Who may import whom (docs/design.md, Where things live)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT_SGLANG = ("tangram_sglang/backend", "patches", "tangram_sglang/cli", "calib")
MAY_IMPORT_TRITON = ("kernels",)
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tangram_sglang", "kernels", "patches", "calib")
    for path in (ROOT / folder).rglob("*.py")
)


def imports(path: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_only_the_adapters_import_sglang_and_only_kernels_triton(path):
    tops = {name.split(".")[0] for name in imports(path)}
    assert "sglang" not in tops or path.startswith(MAY_IMPORT_SGLANG)
    assert "triton" not in tops or path.startswith(MAY_IMPORT_TRITON)


@pytest.mark.parametrize("folder", ["plan", "pool", "score"])
def test_the_core_knows_no_backend(folder):
    for path in SOURCES:
        if path.startswith(f"tangram_sglang/{folder}/"):
            inner = {n for n in imports(path) if n.startswith("tangram_sglang.")}
            assert not any(n.startswith("tangram_sglang.backend") for n in inner), path


def test_top_level_folders_are_no_packages():
    """An __init__.py in kernels/ would shadow the package that SGLang depends on."""
    for folder in ("kernels", "patches", "calib"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_no_module_is_longer_than_400_lines():
    assert [p for p in SOURCES if len((ROOT / p).read_text().splitlines()) > 400] == []
