"""The wording of a report."""

from __future__ import annotations

from optdnn.report.words import first_of


def test_constants_are_named_last() -> None:
    names = ["/Constant_1", "/conv/Conv", "node_Constant_12", "relu"]
    assert first_of(names, 2) == "/conv/Conv, relu and 2 more"
    assert first_of(names[:1], 2) == "/Constant_1"


def test_names_that_only_begin_like_constants_keep_their_place() -> None:
    assert first_of(["/ConstantOfShape", "/a/ConstantPad_1", "b"], 1, total=9) == "/ConstantOfShape and 8 more"
