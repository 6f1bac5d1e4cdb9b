"""Checks that a tag may be released: `python .ci/check_release.py v0.3.0`.

The tag must be the version in pyproject.toml, the changelog must have a section with this version and a date, and no
file may contain the placeholder of the repository's address. Prints every problem; the exit status is 1 if there is
any.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITH_ADDRESS = ("pyproject.toml", "mkdocs.yml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
"""The files that contain the address of the repository or of its documentation."""


def problems(tag: str) -> list[str]:
    """Returns what must be changed before the tag is released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = [] if tag == f"v{version}" else [f"the tag is {tag}, and the version in pyproject.toml is {version}"]
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        found.append(f"CITATION.cff does not have the line 'version: {version}'")
    for name in WITH_ADDRESS:
        if re.search(r"\bOWNER\b", (ROOT / name).read_text()):
            found.append(f"{name} contains OWNER: replace it by the account that owns the repository")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*(found := problems(sys.argv[1])), sep="\n")
    sys.exit(bool(found))
