"""Calibration: the real values that the integers of a quantized network must cover, found by running it on data.

from optdnn.calibration import calibrate
found = calibrate(graph, "pictures.npz", method="entropy", cache="model.calib.json")
"""

from optdnn.calibration.run import calibrate, input_specs, second_moments

__all__ = ["calibrate", "input_specs", "second_moments"]
