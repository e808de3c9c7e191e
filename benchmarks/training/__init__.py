"""The training of the networks that ``optdnn.models.trained`` ships: ``digits`` and ``language``, each a command of its own.

``networks`` and ``language_network`` write the ONNX files from the weights; the tests hold the shipped files against them.
"""
