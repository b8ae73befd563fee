"""The notebooks run from top to bottom with the switch of their first cell."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "recipes").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_begins_with_its_switch(path):
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert "".join(cells[0]["source"]).startswith("SMALL = False")
    for cell in cells:
        assert cell["outputs"] == []
        compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_cpu(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, as_version=4)
    switch = next(cell for cell in book.cells if cell.cell_type == "code")
    switch.source = switch.source.replace("SMALL = False", "SMALL = True")
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == {"benchmark": 5, "speedrun_tinystories": 1}[path.stem]
    text = "".join(output.get("text", "") for output in outputs)
    assert ("Once upon a time" in text) == (path.stem == "speedrun_tinystories")
