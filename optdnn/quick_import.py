"""Modules that are imported when they are first used: the compiler has nearly a thousand."""

from __future__ import annotations

import gc
from importlib import import_module
from types import ModuleType


def quick_import(name: str) -> ModuleType:
    """Import a module. No garbage is collected meanwhile: what modules make stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if enabled:
            gc.enable()
