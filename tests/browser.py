"""A page in a real browser, used by a script, with everything that goes wrong."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome to open the page in")

# Before the page's own script, so that nothing it throws is missed.
WATCH = """<script>
window.wrong = [];
addEventListener("error", e => wrong.push(e.message || `cannot load ${e.target.src}`), true);
addEventListener("unhandledrejection", e => wrong.push(String(e.reason)));
console.error = console.warn = (...words) => wrong.push(words.join(" "));
</script>"""
ACT = """<script>
addEventListener("load", async () => {
  const result = {};
  %s
  const out = document.createElement("pre");
  out.id = "result"; out.textContent = JSON.stringify({...result, wrong}); document.body.append(out);
});
</script>"""


def use(page: str, act: str, folder: Path, width: int = 1000) -> dict:
    """What the script `act` finds and puts into `result`; what went wrong is in `wrong`."""
    assert page.count("<head>") == page.count("</body>") == 1
    watched = folder / "watched.html"
    watched.write_text(page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{ACT % act}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},800", "--virtual-time-budget=10000", "--dump-dom", watched.as_uri()]
    for _ in range(3):  # a browser on a busy machine may dump the page before its scripts have run
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
        if found:
            return json.loads(html.unescape(found.group(1)))
    raise AssertionError(dom[-2000:])
