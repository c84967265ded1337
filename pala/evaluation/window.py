"""A window in which a policy plays."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from pala.evaluation.video import enlarged
from pala.system.errors import PalaError

_UNSEEN = ("offscreen", "dummy")  # what SDL takes where there is no display


class Window:
    """Shows pictures until it is closed. Raises PalaError where there can be none."""

    def __init__(self, title: str) -> None:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            self._pygame: Any = importlib.import_module("pygame")
        except ImportError:
            raise PalaError(
                "A window needs pygame, `pip install pygame-ce`; `--video FILE.mp4` does without a window."
            ) from None
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise PalaError(f"No window can be opened ({error}); `--video FILE.mp4` does without.") from None
        if self._pygame.display.get_driver() in _UNSEEN and "SDL_VIDEODRIVER" not in os.environ:
            raise PalaError("No window can be opened: there is no display; `--video FILE.mp4` does without.")
        self._title, self._clock, self._screen = title, self._pygame.time.Clock(), None

    def show(self, picture: np.ndarray, frames_per_s: float) -> bool:
        """Show a picture, RGB uint8 [H, W, 3], when it is time for it at `frames_per_s`. Returns False when the window
        was closed."""
        self._draw(enlarged(picture).swapaxes(0, 1))
        self._clock.tick(frames_per_s)
        return not any(self._is_end(event) for event in self._pygame.event.get())

    def close(self) -> None:
        """Close the window."""
        self._pygame.display.quit()

    def _draw(self, picture: np.ndarray) -> None:
        """[W, H, 3]: as pygame has it."""
        display = self._pygame.display
        if self._screen is None or self._screen.get_size() != picture.shape[:2]:
            display.quit()  # a second window of SCALED gets no renderer
            display.init()
            display.set_caption(self._title)
            self._screen = display.set_mode(picture.shape[:2], self._pygame.SCALED)
        self._pygame.surfarray.blit_array(self._screen, picture)
        display.flip()

    def _is_end(self, event: Any) -> bool:
        pygame = self._pygame
        return event.type == pygame.QUIT or (
            event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
        )
