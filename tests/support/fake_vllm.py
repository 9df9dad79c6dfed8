"""An environment with a vllm that only echoes."""

import sys
from pathlib import Path


def fake_engine(folder: Path, program: str) -> str:
    """An environment whose `vllm` is a Python program; its library for CPUs is an empty file."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "lib" / "libiomp5.so").touch()
    vllm = folder / "bin" / "vllm"
    vllm.write_text(f"#!{sys.executable}\n{program}")
    vllm.chmod(0o755)
    return str(folder)
