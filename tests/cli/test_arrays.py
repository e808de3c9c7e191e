"""Files of arrays for ``--input``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optdnn.cli.arrays import check_kind, read_inputs, typed, write_outputs
from optdnn.errors import InputError, UsageError
from optdnn.types import TensorSpec


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", np.ones(1))
    np.savez("single.npz", np.full(2, 2.0))
    np.savez("named.npz", x=np.full(3, 3.0), z=np.full(4, 4.0))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["x=one.npy"], {"x": 1}),
        (["named.npz"], {"x": 3, "z": 4}),
        (["z=named.npz"], {"z": 4}),
        (["a=single.npz", "x=one.npy"], {"a": 2, "x": 1}),
        (["a=b=one.npy"], {"a=b": 1}),
    ],
)
def test_names(files: Path, given: list[str], found: dict[str, int]) -> None:
    assert {name: a.size for name, a in read_inputs(given).items()} == found


@pytest.mark.parametrize(
    ("given", "because"),
    [
        (["one.npy"], "needs the input's name: NAME=one.npy"),
        (["y=named.npz"], "no array 'y'; it has x, z"),
        (["x=one.npy", "named.npz"], "'x' is given twice"),
        (["x=none.npy"], "there is no file none.npy"),
    ],
)
def test_refusals(files: Path, given: list[str], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        read_inputs(given)


def test_a_bare_array_is_for_the_only_input(files: Path) -> None:
    x, z = (TensorSpec(name, np.dtype("f4"), (1,)) for name in "xz")
    given = read_inputs(["one.npy"], bare=True)
    assert typed(given, [x])["x"].size == 1
    with pytest.raises(UsageError, match=r"needs the input's name: NAME=FILE\.npy; the inputs are x, z"):
        typed(given, [x, z])
    with pytest.raises(UsageError, match="input 'x' is given twice"):
        typed(read_inputs(["one.npy", "x=one.npy"], bare=True), [x])


def test_a_file_of_something_else_is_not_called_a_pickle(files: Path) -> None:
    (files / "text.npy").write_text("hello")
    with pytest.raises(
        InputError, match=r"not a .npy or .npz file of plain arrays\n  hint: write it with numpy"
    ) as caught:
        read_inputs(["x=text.npy"])
    assert "allow_pickle" not in str(caught.value)


def test_the_suffix_of_an_output_chooses_its_format(files: Path) -> None:
    one, two = {"y": np.ones((), np.float32)}, {"y": np.ones(2), "z": np.zeros(0)}
    write_outputs(files / "y.npy", one)
    assert np.load(files / "y.npy").shape == ()
    for name in ("y.npz", "y.out"):
        write_outputs(files / name, two)
        assert {k: a.size for k, a in np.load(files / name).items()} == {"y": 2, "z": 0}
    with pytest.raises(
        UsageError, match=r"an \.npy holds one array, and the engine has 2 outputs: y, z\n  hint: -o .*y\.npz"
    ):
        check_kind(files / "y.npy", list(two))
    with pytest.raises(UsageError, match=r"y\.csv: outputs are written as \.npz or \.npy\n  hint: -o .*y\.npz"):
        write_outputs(files / "y.csv", one)
