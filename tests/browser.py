"""A page in a real browser, used by a script, with everything that goes wrong."""

import base64
import html
import json
import os
import re
import select
import shutil
import subprocess
import time
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


KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), " ": (32, " "), "Tab": (9, ""), "ArrowLeft": (37, ""), "ArrowUp": (38, ""),
    "ArrowRight": (39, ""), "ArrowDown": (40, ""), "End": (35, ""), "Home": (36, ""),
}  # fmt: skip


class Browser:
    """A browser that is used as a person does: keys, sizes, pictures; for pages that a service gives.

    It is told what to do through a pipe, in Chromium's own protocol; `wrong` has what pages throw and complain about.
    """

    def __init__(self, folder: Path, width: int = 1100, height: int = 760) -> None:
        (told, self._tell), (self._heard, says) = os.pipe(), os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", "about:blank"]
        script = ["bash", "-c", f'exec "$@" 3<&{told} 4>&{says}', "bash", *command]
        self._process = subprocess.Popen(script, pass_fds=(told, says), stderr=subprocess.DEVNULL)
        os.close(told)
        os.close(says)
        self._left, self._number, self._session, self.wrong = b"", 0, "", []
        self.tab()
        self.size(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._tell)
        self._process.kill()
        self._process.wait()
        os.close(self._heard)

    def tab(self) -> str:
        """A new tab, used from now on; what comes back is for `use`."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.use(self._session)
        return self._session

    def use(self, session: str) -> None:
        """Go to a tab."""
        self._session = session
        self.call("Page.bringToFront")

    def call(self, method: str, **params: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._tell, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.wrong.append(answer["params"]["exceptionDetails"].get("exception", {}).get("description", "?"))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.wrong.append(f"{answer['params']['entry']['text']} {answer['params']['entry'].get('url', '')}")

    def _message(self) -> dict:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._heard], [], [], 60)
            assert ready, "the browser says nothing"
            content = os.read(self._heard, 1 << 20)
            assert content, "the browser has ended"
            self._left += content
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> object:
        """What an expression gives, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while True:
            try:
                if self.run(f"(async () => Boolean(await ({script})))()"):
                    return
            except AssertionError:  # the page is just being loaded
                if time.monotonic() > until:
                    raise
            assert time.monotonic() < until, f"{script}: not after {seconds} s; {self.run('document.body.innerText')}"
            time.sleep(0.03)

    def press(self, *keys: str, modifiers: int = 0, held: int = 0, at: str = "") -> None:
        """Keys, each `held` so long that it comes so often again; `at` names the place on the keyboard."""
        for key in keys:
            code, text = KEYS.get(key, (ord(key.upper()) if len(key) == 1 else 0, key))
            event = {"key": key, "code": at, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            for again in range(1 + held):
                self.call("Input.dispatchKeyEvent", type="keyDown", text=text, autoRepeat=again > 0, **event)
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, scale: float = 1) -> None:
        how = dict(width=width, height=height, deviceScaleFactor=scale, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **how)

    def dark(self, yes: bool = True) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if yes else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
