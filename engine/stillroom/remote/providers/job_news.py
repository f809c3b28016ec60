"""Reads the news that a job has written to the bucket, each once, however often it is begun."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.errors import DataError
from stillroom.files import read_json, write_json
from stillroom.remote.providers.hub_bucket import Bucket, RunPaths
from stillroom.remote.providers.job_records import JobNews, JobView
from stillroom.remote.records import AppendedLines, RemoteFile, RemoteFiles
from stillroom.run_folder import JOB_FILE


class NewsReader:
    """The news of a run's job from where an earlier reader stopped. `run` is its folder here.

    seen: the bytes of each growing file that are here. What is here already is left out; where a
    piece is missing, because somebody changed the file here, all news are read once more.
    """

    def __init__(self, bucket: Bucket, run: Path, seen: Mapping[str, int]) -> None:
        self._bucket, self._paths, self._file = bucket, RunPaths(run.name), run / JOB_FILE
        self._view = self._read_view()
        self._known = dict(seen)
        """How far each file is known."""
        ends = self._view.ends
        self._seen = {path: end for path, end in seen.items() if ends.get(path) != end}
        """What is here of the next news, which an earlier reader was killed over."""
        self._has_begun_anew = False

    @property
    def files(self) -> list[RemoteFile]:
        """The finished files, as they were named last."""
        return self._view.files

    @property
    def outputs(self) -> set[str]:
        """The hashes of all files that were ever named."""
        return set(self._view.outputs)

    def next(self) -> Sequence[JobNews] | None:
        """Returns what the next news add to what is here; None if the job has written none yet."""
        batch = self._read(self._view.next_news)
        if batch is None:
            return None
        if self._lacks_some(batch) and not self._has_begun_anew:
            self._has_begun_anew = True
            self._seen, self._view.next_news = dict(self._known), 1
            return self.next()
        fresh = [each for news in batch if (each := self._unseen(news)) is not None]
        for news in fresh:
            if isinstance(news, RemoteFiles):
                self._view.files = news.files
                hashes = {file.sha256 for file in news.files}
                self._view.outputs = sorted(hashes.union(self._view.outputs))
                write_json(self._file, self._view)
        return fresh

    def took(self) -> None:
        """Notes that the news of the last call are here."""
        self._view.next_news += 1
        self._view.ends = dict(self._known)
        write_json(self._file, self._view)

    def _read(self, number: int) -> list[JobNews] | None:
        path = self._paths.news(number)
        if path not in self._bucket.sizes([path]):
            return None
        return msgspec.msgpack.decode(self._bucket.read(path), type=list[JobNews])

    def _lacks_some(self, batch: Sequence[JobNews]) -> bool:
        """Returns whether a file grows from further on than is known of it."""
        ends = dict(self._known)
        for news in batch:
            if isinstance(news, AppendedLines):
                if news.offset > ends.get(news.path, 0):
                    return True
                ends[news.path] = news.offset + len(news.data)
        return False

    def _unseen(self, news: JobNews) -> JobNews | None:
        """Returns what of some news is not here yet; None if all of it is."""
        if not isinstance(news, AppendedLines):
            return news
        seen, end = self._seen.get(news.path, 0), news.offset + len(news.data)
        if end >= seen:
            # From here on nothing of the file is here yet, also if it begins anew.
            self._seen.pop(news.path, None)
        if end <= seen:
            return None
        if news.offset < seen:
            news = AppendedLines(path=news.path, offset=seen, data=news.data[seen - news.offset :])
        self._known[news.path] = end
        return news

    def _read_view(self) -> JobView:
        with suppress(FileNotFoundError, DataError):
            return read_json(self._file, JobView)
        return JobView()
