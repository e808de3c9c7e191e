"""NVIDIA's profilers: their command lines, the facts read from their output, and the errors if they fail.

The tools here are scripts of the tests: NVIDIA's tools are not needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from optdnn.errors import MissingDependency, RunError
from optdnn.runtime.cuda.measuring import nsight
from optdnn.runtime.cuda.measuring.nsight import DRAM, L2_HITS, OCCUPANCY, TENSOR, TIME, count, counters, record_run

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def recorded(*, unit: str = "ns", drop: str = "") -> str:
    """The output of ``ncu --import REPORT --csv --page raw --print-units base``: a remark, names, units, and two kernels."""
    table = {
        "ID": ("", "0", "1"),
        "Process ID": ("", "77", "77"),
        RANGE: ("", '1 ""<default domain>:12: /layer1/conv:none:none:none:none:none:none""', ""),
        "Kernel Name": ("", "conv_hopper", "splitKreduce"),
        TIME: (unit, "12,500", "800"),
        DRAM: ("%", "61.5", "3.25"),
        TENSOR: ("%", "40.25", "n/a"),
        OCCUPANCY: ("%", "18.75", "50"),
        L2_HITS: ("%", "72", "10"),
        STALL.format("long_scoreboard"): ("inst", "3.0", "0.5"),
        STALL.format("wait"): ("inst", "1.0", "1.5"),
        STALL.format("selected"): ("inst", "4.0", "1.0"),
        "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio": ("inst", "99", "99"),
    }
    table.pop(drop, None)
    lines = [",".join(f'"{name}"' for name in table)]
    lines += [",".join(f'"{column[k]}"' for column in table.values()) for k in range(3)]
    return "\n".join(["==PROF== Connected", *lines]) + "\n"


def test_the_counters_of_a_run_on_an_h200() -> None:
    """ncu 2025.3 on the digits network at fp16, batch 64. The columns of the device and the launch are left out."""
    first, second = counters((Path(__file__).parent / "ncu_raw.csv").read_text())
    assert (first.step, first.kernel, first.us) == (0, "conv_stem", 3.648)
    assert (first.dram, first.tensor, first.occupancy) == (0.16, 0.45, 6.24)
    assert first.l2_hits == 100  # ncu prints 101.76, since it counts hits and lookups in different replays
    assert (first.stall, round(first.stall_share, 2)) == ("barrier", 0.17)
    assert (second.step, second.kernel, second.l2_hits, second.stall) == (1, "conv_sm90", 94.32, "long_scoreboard")


def test_units_gaps_and_kernels_without_a_range() -> None:
    first, second = counters(recorded())
    assert (first.step, first.kernel, first.us) == (12, "conv_hopper", 12.5)
    assert (first.dram, first.tensor, first.occupancy, first.l2_hits) == (61.5, 40.25, 18.75, 72.0)
    assert (first.stall, first.stall_share) == ("long_scoreboard", 3 / 8)
    assert (second.step, second.tensor, second.stall) == (None, None, "wait")
    assert counters(recorded(unit="usecond"))[0].us == 12500
    assert counters("\n".join(recorded().splitlines()[:2])) == []


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("==ERROR== something\n", "ncu printed no table"),
        (recorded(drop=TIME), f"no column {TIME}"),
        (recorded(unit="cycle"), "gives times in 'cycle'"),
    ],
)
def test_malformed_tables(text: str, because: str) -> None:
    with pytest.raises(RunError, match=because):
        counters(text)


def tool(folder: Path, name: str, body: str) -> None:
    """A script in place of a tool. ``body`` has the command line's words in ``words``."""
    script = folder / name
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nwords = sys.argv[1:]\n{body}\n")
    script.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which tools are searched."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "PLACES", (str(tmp_path / "else"),))
    return tmp_path


NCU = """
if "--import" in words:
    print(Path({table!r}).read_text(), end="")
else:
    Path(words[words.index("--export") + 1]).write_text(" ".join(words))
"""


def test_a_count_asks_for_the_steps_and_keeps_the_report(folder: Path) -> None:
    (folder / "table").write_text(recorded())
    tool(folder, "ncu", NCU.format(table=str(folder / "table")))
    report = folder / "net.ncu-rep"
    assert [c.step for c in count(["run", "net.engine"], [3, 12], report)] == [12, None]
    asked = report.read_text()
    assert "--nvtx-include regex:^3:.*/ --nvtx-include regex:^12:.*/" in asked
    assert asked.endswith("run net.engine")
    count(["run"], [], report)
    assert "--nvtx-include regex:^[0-9]+:.*/ --section" in report.read_text()


@pytest.mark.parametrize(
    ("body", "because"),
    [
        ('print("==ERROR== ERR_NVGPUCTRPERM - see ..."); sys.exit(1)', r"may not read the GPU's counters\n(.|\n)*root"),
        ('print("no such metric"); sys.exit(9)', r"ncu ended with code 9\n(.|\n)*no such metric"),
        ('print("nothing was profiled")', r"wrote no .*net.ncu-rep\n(.|\n)*nothing was profiled"),
        (NCU.format(table="empty"), "ncu counted no kernel"),
    ],
)
def test_a_count_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, because: str) -> None:
    monkeypatch.chdir(folder)
    Path("empty").write_text("\n".join(recorded().splitlines()[:3]) + "\n")
    tool(folder, "ncu", body)
    with pytest.raises(RunError, match=because):
        count(["run"], [0], folder / "net.ncu-rep")


def test_a_recorded_run(folder: Path) -> None:
    report = folder / "net.nsys-rep"
    tool(folder, "nsys", 'Path(words[words.index("--output") + 1] + ".nsys-rep").write_text(" ".join(words))')
    record_run(["run", "net.engine"], report)
    assert report.read_text().startswith("profile --trace=cuda,nvtx")
    report.unlink()
    tool(folder, "nsys", 'print("only a .qdstrm file")')
    with pytest.raises(RunError, match=r"nsys wrote no .*\n(.|\n)*only a .qdstrm"):
        record_run(["run"], report)


def test_tools_are_found_in_their_own_folders(folder: Path) -> None:
    with pytest.raises(MissingDependency, match=r"Nsight Compute \(ncu\)(.|\n)*--tool trace"):
        nsight.needed("ncu")
    own = folder / "else" / "2025.3"
    own.mkdir(parents=True)
    tool(own, "ncu", "")
    assert nsight.needed("ncu") == str(own / "ncu")
    (folder / "ncu").write_text("not a program")
    os.chmod(folder / "ncu", 0o755)
    with pytest.raises(RunError, match=r"ncu cannot be started|ncu ended with code"):
        count(["run"], [0], folder / "net.ncu-rep")
