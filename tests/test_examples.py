"""The examples run without changes, and the loss falls."""

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from eigengrain.errors import ShortRankWarning

EXAMPLES = Path(__file__).parent.parent / "examples"

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain_loop.py", ["--steps", "8", "--batch_size", "12"]),
        ("own_module.py", []),
        ("own_module.py", ["--head", "isqrt+seb"]),
        pytest.param("accelerated_loop.py", ["--epochs", "4", "--batch_size", "12"], marks=needs_accelerate),
    ],
)
@pytest.mark.filterwarnings(f"error::{ShortRankWarning.__module__}.ShortRankWarning")  # enough positions for the channels
def test_loss_falls(name, options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", capsys.readouterr().out, re.M)]
    assert len(losses) >= 4
    assert losses[-1] < 0.8 * losses[0]


def test_without_accelerate_one_line_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "accelerate.py").write_text("raise ImportError('simulates a missing package')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, str(EXAMPLES / "accelerated_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "this example needs Accelerate: pip install accelerate\n"


def test_every_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["accelerated_loop.py", "own_module.py", "plain_loop.py"]
