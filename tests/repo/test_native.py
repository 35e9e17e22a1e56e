"""The kernels alone, without torch: CMake builds them and ctest runs their own tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_native_tests_pass(tmp_path):
    """setup.py and CMake build from one list of sources; a kernel that needs torch's headers breaks the second."""
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CUDA_ARCHITECTURES=90"],
        ["cmake", "--build", str(tmp_path), "--parallel"],
        ["ctest", "--test-dir", str(tmp_path), "--output-on-failure"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
