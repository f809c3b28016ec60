"""Texts of another machine, with the paths there replaced by those here that they stand for."""

from stillroom.remote.records import JobSpec


class HomeTexts:
    """Replaces the paths of a run's folder there, which hold its random id and so are unique."""

    def __init__(self, spec: JobSpec, workspace: str, root: str) -> None:
        pairs = [
            (f"{root}/{path.place}", path.home)
            for path in spec.home_paths
            if path.home != "~" and not path.place.startswith("package:")
        ]
        pairs.append((f"{root}/workspace", workspace))
        pairs.sort(key=lambda pair: -len(pair[0]))
        self._pairs = [(there.encode(), here.encode()) for there, here in pairs]

    def home(self, text: bytes) -> bytes:
        """Returns a text as if it had been written here."""
        for there, here in self._pairs:
            text = text.replace(there, here)
        return text
