"""The notebook as a reader runs it, with the real Megatron, Ray and vLLM."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_notebook_runs_and_its_model_learns(tmp_path):
    """Its cells compare the model before and after, so that one which learns nothing ends with an error.

    A kernel is no script: it has an event loop, no main module to import again, and streams of its own.
    """
    (tmp_path / "examples").symlink_to(EXAMPLES)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[-2].outputs)
    assert "right answers: " in printed
    assert (tmp_path / "output" / "notebook" / "report.html").is_file()


def test_the_notebook_is_committed_with_its_outputs():
    """Readers see the curve without running it; warnings and tracebacks of the writer's machine stay out."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
