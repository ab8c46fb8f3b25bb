"""A page in headless Chromium, spoken to over its debugging protocol. JupyterLab already brings the websocket package that this needs."""
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import websocket

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*"]


class Browser:
    "Chromium with one tab: `with Browser() as b: b.open(url); b.run('1 + 1')`."

    def __enter__(self):
        self.home = Path(tempfile.mkdtemp())
        self.process = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={self.home}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self.wait(lambda: (self.home / "DevToolsActivePort").exists() and (self.home / "DevToolsActivePort").read_text().split()[0], 60)
        tabs = lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10))
        tab = self.wait(lambda: next((t for t in tabs() if t["type"] == "page"), None), 30)
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=120)
        self.ids, self.errors = itertools.count(1), []
        for domain in ("Page", "Runtime", "Log"): self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(self, *_):
        self.socket.close(); self.process.terminate(); self.process.wait(30)
        shutil.rmtree(self.home, ignore_errors=True)

    def call(self, method, **params):
        "One command of the protocol; what the page complains about meanwhile is kept in `errors`."
        me = next(self.ids)
        self.socket.send(json.dumps(dict(id=me, method=method, params=params)))
        while (m := json.loads(self.socket.recv())).get("id") != me: self.note(m)
        assert "error" not in m, m
        return m["result"]

    def note(self, m):
        p = m.get("params", {})
        if m.get("method") == "Runtime.exceptionThrown": self.errors.append(p["exceptionDetails"].get("text", "") + str(p["exceptionDetails"].get("exception", {}).get("description", "")))
        if m.get("method") == "Runtime.consoleAPICalled" and p["type"] == "error": self.errors.append(str([a.get("value", a.get("description")) for a in p["args"]]))
        if m.get("method") == "Log.entryAdded" and p["entry"]["level"] == "error": self.errors.append(p["entry"]["text"] + " " + p["entry"].get("url", ""))

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait(lambda: self.run("document.readyState") == "complete", 60)

    def run(self, script):
        "The value of a JavaScript expression; a promise is awaited."
        r = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in r, r["exceptionDetails"]
        return r["result"].get("value")

    def look(self, width, dark):
        "A window of this width, in a dark or light theme."
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value="dark" if dark else "light")])

    def wait(self, ready, seconds):
        "What `ready` returns once it is true."
        end = time.monotonic() + seconds
        while not (r := ready()):
            assert time.monotonic() < end, f"not ready after {seconds} s"
            time.sleep(.2)
        return r
