"""Methods from outside the package."""

import importlib.util
import sys
from pathlib import Path

from perlclip.errors import PerlclipError, first_line


def load_plugin(name: str) -> None:
    """Import a module, or a .py file, that registers methods; a second time does nothing."""
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        spec = importlib.util.spec_from_file_location(str(path), path)
        if str(path) in sys.modules or spec is None or spec.loader is None:
            return
        module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError) as error:
        raise PerlclipError(f"cannot load plugin {name!r}: {first_line(error)}") from error
