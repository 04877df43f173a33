"""Recordings without a GPU: what `engine.graphs` records is kept as a function and called again."""

from __future__ import annotations

from collections.abc import Callable

from fake_cuda import Recorder


class Recording:
    """Keeps the function, as a CUDA graph keeps what it queued; replay runs it on the same memory."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()

        def replay() -> None:
            self.num_replays += 1
            compute()

        return replay


class Guarded:
    """A recording in which the host may neither read nor upload."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.num_recorded = 0
        self.num_replays = 0
        self.num_launches = 0
        """Launches inside of recordings and replays."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        def checked() -> None:
            before = (self._recorder.num_reads, self._recorder.uploads, self._recorder.downloads)
            launches = self._recorder.num_launches
            compute()
            self.num_launches += self._recorder.num_launches - launches
            assert (self._recorder.num_reads, self._recorder.uploads, self._recorder.downloads) == before

        def replay() -> None:
            self.num_replays += 1
            checked()

        checked()
        self.num_recorded += 1
        return replay
