"""Options of other programs, trtexec above all: what to write instead of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

OTHER_WORDS: Mapping[str, str] = {
    "--loops": "--iterations",
    "--runs": "--iterations",
    "--repeat": "--iterations",
    "--time": "--duration",
    "--batch": "--size",
    "--batch-size": "--size",
    "--input-shape": "--shape",
    "--device": "--target",
    "--provider": "--target",
    "--dtype": "--precision",
    "--out": "--output",
    "--save": "--output",
    "--inputs": "--input",
    "--feeds": "--input",
    "--calibration": "--calib",
    "--data": "--calib",
    "--accuracy": "--max-error",
    "--reference": "--against",
    "--concurrency": "--streams",
    "--optimize": "--opt-level",
    # trtexec
    "--saveengine": "--output",
    "--timingcachefile": "--timing-cache",
    "--builderoptimizationlevel": "--opt-level",
    "--tacticsources": "--tactics",
    "--mempoolsize": "--workspace",
    "--layerprecisions": "--pin",
    "--precisionconstraints": "--strict-precision",
    "--inputioformats": "--io-dtype",
    "--outputioformats": "--io-dtype",
    "--loadinputs": "--input",
    "--exportprofile": "--json",
    "--exporttimes": "--json",
    "--infstreams": "--streams",
    "--maxauxstreams": "--streams",
}
"""Option name in other programs -> our option."""

ADVICE: Mapping[str, str] = {
    "--onnx": "The model needs no option: optdnn build MODEL.onnx",
    "--loadengine": "The engine needs no option: optdnn bench ENGINE",
    "--usedlacore": "There is no target for the DLA; optdnn env lists the targets",
    "--allowgpufallback": "There is no target for the DLA; optdnn env lists the targets",
    "--usecudagraph": "Leave it out: on a GPU, an engine always runs as a CUDA graph",
    "--notf32": "Leave it out: fp32 is fp32, and tf32 is used only where --precision tf32 asks for it",
    **dict.fromkeys(
        ("--minshapes", "--optshapes", "--maxshapes"), "optdnn build takes all three: --shape x=1..8..32x3x224x224"
    ),
    "--shapes": "optdnn build takes --shape x=1x3x224x224; run and bench take --size N=8",
    **{f"--{p}": f"optdnn build takes --precision {p}" for p in ("fp16", "bf16", "int8", "fp8")},
    "--best": "optdnn build takes --precision auto",
    "--stronglytyped": "Leave it out: types of the model other than fp32 are kept",
    "--avgruns": "Leave it out: optdnn bench shows the percentiles of all runs",
    "--skipinference": "Leave it out: a build measures the engine only with --bench",
    "--nodatatransfers": "Leave it out: optdnn bench shows the GPU's time and the copies separately",
    "--profilingverbosity": "Leave it out: optdnn inspect ENGINE shows the steps of every engine",
    "--dumpprofile": "optdnn bench ENGINE --profile shows the time of each step",
    "--exportoutput": "optdnn run ENGINE --output FILE writes the outputs",
    "--dumpoutput": "optdnn run ENGINE --output FILE writes the outputs",
    **dict.fromkeys(
        ("--sparsity", "--weightstreamingbudget", "--allowweightstreaming", "--stripweights"),
        "optdnn has nothing like it",
    ),
    "--dumplayerinfo": "optdnn inspect ENGINE shows the steps",
    "--exportlayerinfo": "optdnn inspect ENGINE --json FILE.json writes the steps",
    "--plugins": "Custom operators are passed in Python: optdnn.custom_op",
    "--dynamicplugins": "Custom operators are passed in Python: optdnn.custom_op",
    "--versioncompatible": "An engine belongs to the version of optdnn that built it; build it again for another",
    "--hardwarecompatibilitylevel": "An engine is for one architecture: --target cuda:ARCH; build one for each",
}
"""Option of trtexec without a counterpart -> what to do, as a sentence."""


def about_foreign(name: str, known: Collection[str]) -> str | None:
    """The advice for an option of another program. ``known``: the command's options."""
    word = name.lower()
    if word in ADVICE:
        return f"No such option {name!r}. {ADVICE[word]}."
    meant = OTHER_WORDS.get(word)
    return f"No such option {name!r}. Did you mean {meant!r}?" if meant in known else None
