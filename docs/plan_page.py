"""Makes docs/plan_page.png: a screenshot of the page that `fzero plan --html` writes for Llama 3 8B on 8 H100.

    python docs/plan_page.py

Needs Chromium, `pip install -e '.[plan,hf]'`, and one or two minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # of matplotlib

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_name("plan_page.png")
COMMAND = ("plan", "--hf", "examples/llama_3_8b.json", "--devices", "8xh100")
WIDTH, HEIGHT = 1400, 1440  # to the end of the timeline


def main() -> int:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("docs/plan_page.py needs Chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "report.html"), Path(folder, "page.png")
        subprocess.run([sys.executable, "-m", "fzero", *COMMAND, "--html", str(page)], cwd=ROOT, check=True)
        screenshot(browser, page, picture, folder)
        with Image.open(picture) as image:
            image.convert("RGB").save(FILE, optimize=True)
    print(f"{FILE.relative_to(ROOT)}: {FILE.stat().st_size / 1000:.0f} kB")
    return 0


def screenshot(browser: str, page: Path, picture: Path, folder: str) -> None:
    """Writes what a light window of the page shows."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
    options = (
        f"--user-data-dir={folder}/profile",
        f"--window-size={WIDTH},{HEIGHT}",
        "--blink-settings=preferredColorScheme=1",
        "--virtual-time-budget=10000",
        f"--screenshot={picture}",
    )
    subprocess.run([browser, *flags, *options, page.as_uri()], check=True, capture_output=True, timeout=240)


if __name__ == "__main__":
    sys.exit(main())
