"""The model that a build compiles: the user's model, and the operators that the options add."""

from __future__ import annotations

from optdnn.config import BuildOptions
from optdnn.importers.draws import with_draws
from optdnn.importers.model import Model, Source, open_model
from optdnn.importers.pictures import with_pictures
from optdnn.importers.sampling import with_sampling
from optdnn.importers.values import with_values


def asked_model(source: Source | Model, options: BuildOptions) -> Model:
    """The model that a build with these options compiles.

    The options may turn inputs into constants, make random operators draw the same numbers in each run, sample the next token, and
    add preprocessing and postprocessing.
    Raises UsageError for options that do not fit the model.
    """
    model = source if isinstance(source, Model) else open_model(source)
    if options.values:
        model = with_values(model, options.values)
    if options.random_seed is not None:
        model = with_draws(model, options.random_seed)
    if options.sample is not None:
        model = with_sampling(model, options.sample)
    return with_pictures(model, options.preprocess, options.postprocess)


def changes_model(options: BuildOptions) -> bool:
    """Whether options may change the user's model."""
    asked = (options.sample is not None, options.random_seed is not None)
    return any(asked) or bool(options.values or options.preprocess or options.postprocess)
