"""How far the demo is, on stderr."""

from __future__ import annotations

import shutil
from typing import Any, TextIO

from actorsub._demo.figures import count
from actorsub._demo.settings import Settings


class Progress:
    """One bar over all modes on a terminal, one line per step elsewhere."""

    # Share of a mode that is over when its load begins, and when it ends.
    _LOAD_BEGINS, _LOAD_ENDS = 0.2, 0.92

    def __init__(self, stream: TextIO, settings: Settings) -> None:
        self._stream = stream
        self._settings = settings
        self._tty = stream.isatty()
        self._index = 0
        self._step = ""

    def start(self, index: int) -> None:
        self._index = index
        self._show("starting", "starting a local Ray and its workers", 0.0)

    def report(self, report: dict[str, Any]) -> None:
        seconds = self._settings.seconds
        if report["kind"] == "result":
            self._show("stopping", "stopping", self._LOAD_ENDS)
        elif report["elapsed_s"] < seconds:
            share = self._LOAD_BEGINS + (self._LOAD_ENDS - self._LOAD_BEGINS) * report["elapsed_s"] / seconds
            text = f"requests sent {report['sent']}, open {report['open']}; workers killed {report['killed']}"
            plain = f"sending requests for {seconds:g} s"
            self._show("load", text if self._tty else plain, share)
        else:
            self._show("drain", f"waiting for {count(report['open'], 'open request')}", self._LOAD_ENDS)

    def close(self) -> None:
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, step: str, text: str, share: float) -> None:
        modes = self._settings.modes
        label = modes[self._index].label
        if not self._tty:
            if step != self._step:
                print(f"[{self._index + 1}/{len(modes)}] {label}: {text}", file=self._stream, flush=True)
        else:
            done = (self._index + share) / len(modes)
            width = 24
            bar = ("#" * round(done * width)).ljust(width, ".")
            line = f"[{bar}] {done:4.0%}  {label}: {text}"
            columns = shutil.get_terminal_size().columns
            self._stream.write("\r\x1b[K" + line[: columns - 1])
            self._stream.flush()
        self._step = step
