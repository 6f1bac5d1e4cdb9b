"""Starts the supervisor of a rank, `python -m fzero.run script.py`, without PyTorch (elastic/supervisor.py).

As an import this name is the function `fz.run`: `import fzero.run` binds it in the package, where the module would
otherwise shadow it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from fzero.elastic.supervisor import main

    sys.exit(main())
else:
    from fzero.elastic.restarts import run

    sys.modules[__name__] = run  # type: ignore[assignment]
